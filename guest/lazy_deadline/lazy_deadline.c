// SPDX-License-Identifier: GPL-2.0
/*
 * Lazy TSC deadline: moving a timer later costs no exit
 *
 * In a virtual machine each write of IA32_TSC_DEADLINE is an exit, and most of
 * them move the timer later: they are overwritten again before anything fires.
 * This module stands between the clock event core and the local APIC's device
 * of each CPU and writes only what must be written:
 *
 * guest-only:	works on any hypervisor. The MSR keeps the earlier deadline. Its
 *		interrupt comes too early and, instead of running the handler,
 *		arms the timer for the deadline in force.
 * paravirtual:	on a host that has the registers below. The deadline in force is
 *		in memory that the host looks into when the armed one expires,
 *		so that a halted CPU sleeps on.
 * plain:	writes what the stock driver writes, and measures.
 *
 * The protocol and the reasons why no deadline is lost are in vpmu's
 * docs/lazy-deadline.md; lazy_guest_only() and lazy_paravirtual() are its guest
 * halves line by line.
 *
 * The device's functions are called on its own CPU with interrupts off, so the
 * state of a CPU needs no lock. It is also taken over and given back there, with
 * interrupts off: no function of this module is running on that CPU then, and
 * none is called later.
 */

#define pr_fmt(fmt) KBUILD_MODNAME ": " fmt

#include <linux/clockchips.h>
#include <linux/cpu.h>
#include <linux/cpuhotplug.h>
#include <linux/debugfs.h>
#include <linux/kprobes.h>
#include <linux/math64.h>
#include <linux/module.h>
#include <linux/mutex.h>
#include <linux/reboot.h>
#include <linux/sched.h>
#include <linux/seq_file.h>
#include <linux/slab.h>
#include <linux/static_call.h>
#include <linux/suspend.h>
#include <linux/uaccess.h>

#include <asm/barrier.h>
#include <asm/cpufeature.h>
#include <asm/io.h>
#include <asm/msr.h>
#include <asm/processor.h>
#include <asm/tsc.h>

/* How a host says that it has the two registers, and what they are. */
#define VPMU_CPUID_SIGNATURE		0x40000100
#define VPMU_CPUID_FEATURES		0x40000101
#define VPMU_FEATURE_DEADLINE		BIT(0)
#define VPMU_MSR_SLOT			0x4b564d56
#define VPMU_MSR_DEADLINE		0x4b564d57
#define VPMU_SLOT_ENABLE		BIT_ULL(0)

/* What this CPU and its host share. "vpmuTSC", layout 1. */
#define VPMU_DEADLINE_TAG		0x76706d7554534301ULL

struct vpmu_deadline_slot {
	u64 armed;	/* host: looks at pending at this TSC; 0: write the MSR */
	u64 pending;	/* guest: the deadline wanted; 0: none. Host: fired -> 0 */
	u64 tag;	/* guest: VPMU_DEADLINE_TAG while this is a slot */
	u64 reserved[5];
} __aligned(64);

enum lazy_mode { OFF, PLAIN, GUEST_ONLY, PARAVIRTUAL };

static const char * const lazy_mode_names[] = {
	[OFF] = "off",
	[PLAIN] = "plain",
	[GUEST_ONLY] = "guest-only",
	[PARAVIRTUAL] = "paravirtual",
};

static char *mode = "guest-only";
module_param(mode, charp, 0444);
MODULE_PARM_DESC(mode, "off, plain, guest-only (default) or paravirtual; later: debugfs lazy_deadline/mode");

/* Latencies in TSC ticks: 2^HIST_BITS steps in each power of two. */
#define HIST_BITS	5
#define HIST_STEPS	BIT(HIST_BITS)
#define HIST_BUCKETS	((40 - HIST_BITS) * HIST_STEPS)

struct lazy_counters {
	u64 asked;		/* deadlines, and stops of the timer */
	u64 avoided;		/* of these: nothing was written */
	u64 written;		/* of these: the MSR was, or the LVT masked */
	u64 interrupts;		/* timer interrupts */
	u64 early;		/* of these: before the deadline in force */
	u64 rearmed;		/* of these: MSR written for it */
	u64 stray;		/* of these: no deadline was in force */
	u64 idle_due;		/* of these: due, on an idle CPU */
	u64 idle_extra;		/* of these: early or stray, on an idle CPU */
};

struct lazy_latency {
	u64 min, max, count;
	u64 buckets[HIST_BUCKETS];
};

struct lazy_cpu {
	struct vpmu_deadline_slot slot;
	struct clock_event_device *evt;		/* NULL: not taken over */

	/* The device's own functions. */
	void (*event_handler)(struct clock_event_device *evt);
	int (*set_next_event)(unsigned long delta,
			      struct clock_event_device *evt);
	int (*set_state_oneshot)(struct clock_event_device *evt);
	int (*set_state_oneshot_stopped)(struct clock_event_device *evt);
	int (*set_state_shutdown)(struct clock_event_device *evt);

	u64 armed;	/* guest-only: what the MSR holds; 0: nothing, or unknown */
	u64 wanted;	/* the deadline in force; 0: none */
	bool down;	/* the LVT is masked: shut down by the device's own function */

	/* The event and the deadline made of it: last written, last asked. */
	ktime_t written_event, asked_event;
	u64 written_deadline, asked_deadline;

	struct lazy_counters counters;
	struct lazy_latency latency;
};

/* Not a clock event device's nature, but needed to find the one of a CPU. */
struct tick_device_head {
	struct clock_event_device *evtdev;
};

static struct tick_device_head *lazy_no_device(int cpu)
{
	return NULL;
}

/*
 * Called directly, not through a pointer: kernels with indirect branch tracking
 * take the ENDBR away from functions that nobody calls through one.
 */
DEFINE_STATIC_CALL(lazy_tick_get_device, lazy_no_device);

static DEFINE_PER_CPU(struct lazy_cpu *, lazy_cpus);
static DEFINE_MUTEX(lazy_mutex);	/* changes of the mode */
static enum lazy_mode lazy_mode;
static bool lazy_asleep;		/* or about to be: the mode stays off */
static enum cpuhp_state lazy_hotplug;
static unsigned int lazy_divisor;	/* TSC ticks in a tick of the device */
static u64 lazy_same;			/* TSC ticks in a microsecond */
static struct dentry *lazy_dir;

static void lazy_write(struct lazy_cpu *t, u64 deadline)
{
	if (lazy_mode == PARAVIRTUAL) {
		wrmsrl(VPMU_MSR_DEADLINE, deadline);
		return;
	}
	/* As the stock driver: the write must not pass one to the LVT. */
	weak_wrmsr_fence();
	wrmsrl(MSR_IA32_TSC_DEADLINE, deadline);
}

/* True if the timer is armed early enough for @deadline. */
static bool lazy_guest_only(struct lazy_cpu *t, u64 deadline)
{
	t->wanted = deadline;
	/*
	 * An armed time that has passed is not trusted to bring an interrupt:
	 * it may have come and gone while the LVT was masked.
	 */
	if (deadline && t->armed <= deadline && rdtsc() < t->armed)
		return true;
	t->armed = deadline;
	lazy_write(t, deadline);
	return false;
}

static bool lazy_paravirtual(struct lazy_cpu *t, u64 deadline)
{
	u64 armed;

	t->wanted = deadline;
	WRITE_ONCE(t->slot.pending, deadline);
	/* Pairs with the host's: clear armed; barrier; read pending. */
	virt_mb();
	armed = READ_ONCE(t->slot.armed);
	if (deadline && armed && armed <= deadline)
		return true;
	lazy_write(t, deadline);
	return false;
}

static bool lazy_plain(struct lazy_cpu *t, u64 deadline)
{
	t->wanted = deadline;
	lazy_write(t, deadline);
	return false;
}

/* Asks for the handler to run at @deadline; 0: disarms, with an exit. */
static void lazy_ask(struct lazy_cpu *t, u64 deadline)
{
	bool avoided;

	t->counters.asked++;
	switch (lazy_mode) {
	case GUEST_ONLY:
		avoided = lazy_guest_only(t, deadline);
		break;
	case PARAVIRTUAL:
		avoided = lazy_paravirtual(t, deadline);
		break;
	default:
		avoided = lazy_plain(t, deadline);
	}
	if (avoided)
		t->counters.avoided++;
	else
		t->counters.written++;
}

/* The timer is, or will be, written by somebody else. */
static void lazy_forget(struct lazy_cpu *t)
{
	t->armed = 0;
	t->wanted = 0;
	t->written_deadline = 0;
	t->asked_deadline = 0;
}

static void lazy_measure(struct lazy_cpu *t, u64 ticks)
{
	struct lazy_latency *l = &t->latency;
	unsigned int top = fls64(ticks | (HIST_STEPS - 1));
	unsigned int bucket = (top - HIST_BITS) * HIST_STEPS;

	if (top > HIST_BITS)
		bucket += (ticks >> (top - HIST_BITS - 1)) & (HIST_STEPS - 1);
	else
		bucket += ticks;
	l->buckets[min_t(unsigned int, bucket, HIST_BUCKETS - 1)]++;
	if (!l->count || ticks < l->min)
		l->min = ticks;
	if (ticks > l->max)
		l->max = ticks;
	l->count++;
}

/* The lowest latency in @bucket. */
static u64 lazy_bucket(unsigned int bucket)
{
	unsigned int power = bucket >> HIST_BITS;
	u64 step = bucket & (HIST_STEPS - 1);

	return power ? (step + HIST_STEPS) << (power - 1) : step;
}

/* A timer interrupt: true if the handler is to run. */
static bool lazy_interrupt(struct lazy_cpu *t)
{
	bool idle = is_idle_task(current);
	u64 now = rdtsc();

	t->counters.interrupts++;
	/*
	 * Spent, even if its time is still to come: hypervisors keep time with
	 * another clock and may be early. If it is not, because this interrupt
	 * was on its way when the MSR was written, it will be one too many.
	 */
	t->armed = 0;
	if (t->wanted && t->wanted <= now) {
		lazy_measure(t, now - t->wanted);
		t->counters.idle_due += idle;
		t->wanted = 0;
		return true;
	}
	t->counters.idle_extra += idle;
	if (!t->wanted) {
		t->counters.stray++;
		/*
		 * Not stopped, and no event either: the core leaves it to an
		 * interrupt that is on its way, as after a deep idle state.
		 */
		return lazy_mode != GUEST_ONLY || clockevent_state_oneshot(t->evt);
	}
	t->counters.early++;
	if (lazy_mode != GUEST_ONLY)
		return true;
	t->armed = t->wanted;
	lazy_write(t, t->wanted);
	t->counters.rearmed++;
	return false;
}

static void lazy_event_handler(struct clock_event_device *evt);

/* The core's handler may have changed: to high resolution, after boot. */
static void lazy_wrap(struct lazy_cpu *t, struct clock_event_device *evt)
{
	if (evt->event_handler == lazy_event_handler)
		return;
	t->event_handler = evt->event_handler;
	evt->event_handler = lazy_event_handler;
}

static void lazy_event_handler(struct clock_event_device *evt)
{
	struct lazy_cpu *t = this_cpu_read(lazy_cpus);

	/* Another device may have inherited this handler; or nobody stops here. */
	if (evt == t->evt && !t->down && !lazy_interrupt(t))
		return;
	/* The periodic handler goes on only where it finds itself. */
	evt->event_handler = t->event_handler;
	t->event_handler(evt);
	if (evt == t->evt)
		lazy_wrap(t, evt);
}

/*
 * The core makes a deadline of an event anew each time, with a clock whose rate
 * is steered: the same event may come out some ticks earlier than it is armed.
 */
static u64 lazy_deadline(struct lazy_cpu *t, ktime_t event, u64 deadline)
{
	if (event == t->written_event &&
	    deadline - t->written_deadline + lazy_same <= 2 * lazy_same)
		deadline = t->written_deadline;
	else if (event == t->asked_event &&
		 deadline - t->asked_deadline + lazy_same <= 2 * lazy_same)
		deadline = t->asked_deadline;
	return deadline;
}

static int lazy_set_next_event(unsigned long delta,
			       struct clock_event_device *evt)
{
	struct lazy_cpu *t = this_cpu_read(lazy_cpus);
	u64 deadline = rdtsc() + (u64)delta * lazy_divisor;
	u64 written = t->counters.written;

	lazy_wrap(t, evt);
	if (lazy_mode != PLAIN)
		deadline = lazy_deadline(t, evt->next_event, deadline);
	lazy_ask(t, deadline);
	t->asked_event = evt->next_event;
	t->asked_deadline = deadline;
	if (t->counters.written != written) {
		t->written_event = evt->next_event;
		t->written_deadline = deadline;
	}
	return 0;
}

static int lazy_set_state_oneshot(struct clock_event_device *evt)
{
	struct lazy_cpu *t = this_cpu_read(lazy_cpus);

	/* Back from a stop that changed nothing. */
	if (!t->down)
		return 0;
	t->down = false;
	return t->set_state_oneshot(evt);
}

/* No event at all until the next set_next_event: left armed, and ignored. */
static int lazy_set_state_oneshot_stopped(struct clock_event_device *evt)
{
	struct lazy_cpu *t = this_cpu_read(lazy_cpus);

	t->counters.asked++;
	if (lazy_mode == PLAIN) {
		t->counters.written++;
		lazy_forget(t);
		t->down = true;
		return t->set_state_oneshot_stopped(evt);
	}
	t->counters.avoided++;
	t->wanted = 0;
	if (lazy_mode == PARAVIRTUAL)
		WRITE_ONCE(t->slot.pending, 0);
	return 0;
}

/* Sleep, another device, or the CPU goes: all that is armed is gone after it. */
static int lazy_set_state_shutdown(struct clock_event_device *evt)
{
	struct lazy_cpu *t = this_cpu_read(lazy_cpus);

	if (lazy_mode != PLAIN)
		lazy_ask(t, 0);
	lazy_forget(t);
	t->down = true;
	return t->set_state_shutdown(evt);
}

static bool lazy_is_deadline(int cpu, struct clock_event_device *evt)
{
	return evt && evt->name && !strcmp(evt->name, "lapic-deadline") &&
	       !(evt->features & CLOCK_EVT_FEAT_DUMMY) &&
	       cpumask_equal(evt->cpumask, cpumask_of(cpu));
}

/* Interrupts off from here to lazy_give_back. */
static int lazy_attach(struct lazy_cpu *t)
{
	t->slot.armed = 0;
	t->slot.pending = 0;
	t->slot.tag = VPMU_DEADLINE_TAG;
	return wrmsrl_safe(VPMU_MSR_SLOT, __pa(&t->slot) | VPMU_SLOT_ENABLE);
}

static void lazy_detach(struct lazy_cpu *t)
{
	wrmsrl(VPMU_MSR_SLOT, 0);
	t->slot.tag = 0;
	t->slot.pending = 0;
}

static int lazy_take_over(struct lazy_cpu *t, struct clock_event_device *evt)
{
	u64 deadline;
	int err;

	rdmsrl(MSR_IA32_TSC_DEADLINE, deadline);
	if (lazy_mode == PARAVIRTUAL) {
		err = lazy_attach(t);
		if (err)
			return err;
		wrmsrl(MSR_IA32_TSC_DEADLINE, 0);
	}
	lazy_forget(t);
	t->evt = evt;
	t->down = !clockevent_state_oneshot(evt);
	t->event_handler = evt->event_handler;
	t->set_next_event = evt->set_next_event;
	t->set_state_oneshot = evt->set_state_oneshot;
	t->set_state_oneshot_stopped = evt->set_state_oneshot_stopped;
	t->set_state_shutdown = evt->set_state_shutdown;
	evt->event_handler = lazy_event_handler;
	evt->set_next_event = lazy_set_next_event;
	evt->set_state_oneshot = lazy_set_state_oneshot;
	evt->set_state_oneshot_stopped = lazy_set_state_oneshot_stopped;
	evt->set_state_shutdown = lazy_set_state_shutdown;
	/*
	 * 0: its interrupt is on its way, or the event is past. One interrupt
	 * too many does no harm.
	 */
	if (!t->down)
		lazy_ask(t, deadline ?: rdtsc());
	return 0;
}

static void lazy_give_back(struct lazy_cpu *t)
{
	struct clock_event_device *now, *evt = t->evt;
	u64 wanted = t->wanted;

	if (lazy_mode == PARAVIRTUAL) {
		if (!t->down)
			lazy_ask(t, 0);
		lazy_detach(t);
	}
	evt->set_next_event = t->set_next_event;
	evt->set_state_oneshot = t->set_state_oneshot;
	evt->set_state_oneshot_stopped = t->set_state_oneshot_stopped;
	evt->set_state_shutdown = t->set_state_shutdown;
	if (evt->event_handler == lazy_event_handler)
		evt->event_handler = t->event_handler;
	/* A device that replaced this one since has inherited its handler. */
	now = static_call(lazy_tick_get_device)(smp_processor_id())->evtdev;
	if (now && now->event_handler == lazy_event_handler)
		now->event_handler = t->event_handler;
	t->evt = NULL;
	if (clockevent_state_oneshot(evt)) {
		weak_wrmsr_fence();
		wrmsrl(MSR_IA32_TSC_DEADLINE, wanted ?: rdtsc());
	} else if (clockevent_state_oneshot_stopped(evt) && !t->down) {
		evt->set_state_oneshot_stopped(evt);
	}
}

static int lazy_online(unsigned int cpu)
{
	struct lazy_cpu *t = per_cpu(lazy_cpus, cpu);
	struct clock_event_device *evt;
	unsigned long flags;
	int err = -ENODEV;

	local_irq_save(flags);
	evt = static_call(lazy_tick_get_device)(cpu)->evtdev;
	if (lazy_is_deadline(cpu, evt))
		err = lazy_take_over(t, evt);
	local_irq_restore(flags);
	/* A CPU comes online even so, and keeps its timer. */
	if (err)
		pr_warn("cpu%u: its timer is left alone (%d)\n", cpu, err);
	return 0;
}

static int lazy_offline(unsigned int cpu)
{
	struct lazy_cpu *t = per_cpu(lazy_cpus, cpu);
	unsigned long flags;

	local_irq_save(flags);
	if (t->evt)
		lazy_give_back(t);
	local_irq_restore(flags);
	return 0;
}

static bool lazy_host_has_slot(void)
{
	u32 eax, signature[3];

	if (!boot_cpu_has(X86_FEATURE_HYPERVISOR))
		return false;
	cpuid(VPMU_CPUID_SIGNATURE, &eax, &signature[0], &signature[1],
	      &signature[2]);
	return !memcmp(signature, "vpmuvpmuvpmu", sizeof(signature)) &&
	       eax >= VPMU_CPUID_FEATURES &&
	       cpuid_eax(VPMU_CPUID_FEATURES) & VPMU_FEATURE_DEADLINE;
}

static int lazy_set_mode(enum lazy_mode new)
{
	int ret;

	lockdep_assert_held(&lazy_mutex);
	if (new == lazy_mode)
		return 0;
	if (new == PARAVIRTUAL && !lazy_host_has_slot()) {
		pr_err("this host has no deadline slot; use guest-only\n");
		return -ENODEV;
	}
	if (lazy_mode != OFF)
		cpuhp_remove_state(lazy_hotplug);
	lazy_mode = new;
	if (new == OFF)
		return 0;
	ret = cpuhp_setup_state(CPUHP_AP_ONLINE_DYN, "lazy_deadline:online",
				lazy_online, lazy_offline);
	if (ret < 0) {
		lazy_mode = OFF;
		return ret;
	}
	lazy_hotplug = ret;
	return 0;
}

static int lazy_find_mode(const char *name)
{
	return sysfs_match_string(lazy_mode_names, name);
}

/* Before another kernel: it does not know what is armed, or shared. */
static int lazy_reboot(struct notifier_block *nb, unsigned long action,
		       void *data)
{
	mutex_lock(&lazy_mutex);
	lazy_asleep = true;
	lazy_set_mode(OFF);
	mutex_unlock(&lazy_mutex);
	return NOTIFY_DONE;
}

static struct notifier_block lazy_reboot_nb = {
	.notifier_call = lazy_reboot,
};

/*
 * The host forgets slots over a guest's sleep, and after a hibernation it may be
 * another one.
 */
static int lazy_sleep(struct notifier_block *nb, unsigned long action,
		      void *data)
{
	static enum lazy_mode before;

	mutex_lock(&lazy_mutex);
	switch (action) {
	case PM_SUSPEND_PREPARE:
	case PM_HIBERNATION_PREPARE:
		before = lazy_mode;
		lazy_asleep = true;
		lazy_set_mode(OFF);
		break;
	case PM_POST_SUSPEND:
	case PM_POST_HIBERNATION:
		lazy_asleep = false;
		lazy_set_mode(before);
		break;
	}
	mutex_unlock(&lazy_mutex);
	return NOTIFY_DONE;
}

static struct notifier_block lazy_sleep_nb = {
	.notifier_call = lazy_sleep,
};

static int mode_show(struct seq_file *m, void *unused)
{
	seq_printf(m, "%s\n", lazy_mode_names[READ_ONCE(lazy_mode)]);
	return 0;
}

static ssize_t mode_write(struct file *file, const char __user *text,
			  size_t count, loff_t *pos)
{
	char name[16] = "";
	int ret;

	if (count >= sizeof(name))
		return -EINVAL;
	if (copy_from_user(name, text, count))
		return -EFAULT;
	ret = lazy_find_mode(name);
	if (ret < 0)
		return ret;
	mutex_lock(&lazy_mutex);
	ret = lazy_asleep ? -EBUSY : lazy_set_mode(ret);
	mutex_unlock(&lazy_mutex);
	return ret ?: count;
}

static int mode_open(struct inode *inode, struct file *file)
{
	return single_open(file, mode_show, NULL);
}

static const struct file_operations mode_fops = {
	.owner = THIS_MODULE,
	.open = mode_open,
	.read = seq_read,
	.write = mode_write,
	.llseek = seq_lseek,
	.release = single_release,
};

static int counters_show(struct seq_file *m, void *unused)
{
	int cpu;

	seq_puts(m, "cpu asked avoided written interrupts early rearmed stray idle_due idle_extra\n");
	for_each_possible_cpu(cpu) {
		struct lazy_counters *c = &per_cpu(lazy_cpus, cpu)->counters;

		seq_printf(m,
			   "%d %llu %llu %llu %llu %llu %llu %llu %llu %llu\n", cpu,
			   READ_ONCE(c->asked), READ_ONCE(c->avoided),
			   READ_ONCE(c->written), READ_ONCE(c->interrupts),
			   READ_ONCE(c->early), READ_ONCE(c->rearmed),
			   READ_ONCE(c->stray), READ_ONCE(c->idle_due),
			   READ_ONCE(c->idle_extra));
	}
	return 0;
}
DEFINE_SHOW_ATTRIBUTE(counters);

/* The sum of all CPUs. The caller frees it. */
static struct lazy_latency *lazy_latencies(void)
{
	struct lazy_latency *sum = kzalloc(sizeof(*sum), GFP_KERNEL);
	int cpu, i;

	if (!sum)
		return NULL;
	for_each_possible_cpu(cpu) {
		struct lazy_latency *l = &per_cpu(lazy_cpus, cpu)->latency;

		if (!READ_ONCE(l->count))
			continue;
		if (!sum->count || l->min < sum->min)
			sum->min = l->min;
		sum->max = max(sum->max, l->max);
		/* What is in the buckets now, whoever goes on counting. */
		for (i = 0; i < HIST_BUCKETS; i++) {
			u64 n = READ_ONCE(l->buckets[i]);

			sum->buckets[i] += n;
			sum->count += n;
		}
	}
	return sum;
}

static u64 lazy_ns(u64 ticks)
{
	return mul_u64_u32_div(ticks, USEC_PER_SEC, tsc_khz);
}

static u64 lazy_percentile(const struct lazy_latency *l, unsigned int percent)
{
	u64 left = div_u64(l->count * percent + 99, 100);
	int i;

	for (i = 0; i < HIST_BUCKETS - 1; i++) {
		if (left <= l->buckets[i])
			break;
		left -= l->buckets[i];
	}
	return clamp(lazy_bucket(i), l->min, l->max);
}

static int latency_show(struct seq_file *m, void *unused)
{
	struct lazy_latency *l = lazy_latencies();

	if (!l)
		return -ENOMEM;
	seq_puts(m, "count min_ns median_ns p99_ns max_ns\n");
	seq_printf(m, "%llu %llu %llu %llu %llu\n", l->count, lazy_ns(l->min),
		   lazy_ns(lazy_percentile(l, 50)),
		   lazy_ns(lazy_percentile(l, 99)), lazy_ns(l->max));
	kfree(l);
	return 0;
}
DEFINE_SHOW_ATTRIBUTE(latency);

static int histogram_show(struct seq_file *m, void *unused)
{
	struct lazy_latency *l = lazy_latencies();
	int i;

	if (!l)
		return -ENOMEM;
	seq_puts(m, "from_ns count\n");
	for (i = 0; i < HIST_BUCKETS; i++) {
		if (l->buckets[i])
			seq_printf(m, "%llu %llu\n", lazy_ns(lazy_bucket(i)),
				   l->buckets[i]);
	}
	kfree(l);
	return 0;
}
DEFINE_SHOW_ATTRIBUTE(histogram);

static void lazy_clear(struct lazy_cpu *t)
{
	memset(&t->counters, 0, sizeof(t->counters));
	memset(&t->latency, 0, sizeof(t->latency));
}

static void lazy_reset(void *unused)
{
	lazy_clear(this_cpu_read(lazy_cpus));
}

static ssize_t reset_write(struct file *file, const char __user *text,
			   size_t count, loff_t *pos)
{
	int cpu;

	cpus_read_lock();
	on_each_cpu(lazy_reset, NULL, 1);
	for_each_possible_cpu(cpu) {
		if (!cpu_online(cpu))
			lazy_clear(per_cpu(lazy_cpus, cpu));
	}
	cpus_read_unlock();
	return count;
}

static const struct file_operations reset_fops = {
	.owner = THIS_MODULE,
	.open = simple_open,
	.write = reset_write,
};

/* The one symbol that is not exported: which clock event device a CPU uses. */
static int __init lazy_look_up(void)
{
	struct kprobe probe = { .symbol_name = "tick_get_device" };
	int err = register_kprobe(&probe);

	if (err) {
		pr_err("cannot find tick_get_device (%d): are kprobes permitted?\n",
		       err);
		return err;
	}
	static_call_update(lazy_tick_get_device, (void *)probe.addr);
	unregister_kprobe(&probe);
	return 0;
}

static int __init lazy_check_device(void)
{
	struct clock_event_device *evt;
	int cpu = get_cpu();
	bool fits;
	u64 hz;

	evt = static_call(lazy_tick_get_device)(cpu)->evtdev;
	fits = lazy_is_deadline(cpu, evt);
	if (fits) {
		hz = ((u64)evt->mult * NSEC_PER_SEC) >> evt->shift;
		lazy_divisor = DIV_ROUND_CLOSEST_ULL((u64)tsc_khz * 1000, hz);
	}
	put_cpu();
	if (!fits) {
		pr_err("the timer in use is not the local APIC's TSC deadline\n");
		return -ENODEV;
	}
	lazy_same = tsc_khz / 1000;
	return 0;
}

static void lazy_free(void)
{
	int cpu;

	for_each_possible_cpu(cpu)
		kfree(per_cpu(lazy_cpus, cpu));
}

static int __init lazy_init(void)
{
	int cpu, first, err;

	first = lazy_find_mode(mode);
	if (first < 0) {
		pr_err("mode=%s: off, plain, guest-only or paravirtual\n", mode);
		return first;
	}
	if (!boot_cpu_has(X86_FEATURE_TSC_DEADLINE_TIMER)) {
		pr_err("this CPU has no TSC deadline timer\n");
		return -ENODEV;
	}
	err = lazy_look_up();
	if (err)
		return err;
	err = lazy_check_device();
	if (err)
		return err;

	for_each_possible_cpu(cpu) {
		struct lazy_cpu *t;

		/* A power of two: kmalloc aligns it to its size. */
		t = kzalloc_node(roundup_pow_of_two(sizeof(*t)), GFP_KERNEL,
				 cpu_to_node(cpu));
		per_cpu(lazy_cpus, cpu) = t;
		if (!t) {
			lazy_free();
			return -ENOMEM;
		}
	}
	mutex_lock(&lazy_mutex);
	err = lazy_set_mode(first);
	mutex_unlock(&lazy_mutex);
	if (err) {
		lazy_free();
		return err;
	}
	register_pm_notifier(&lazy_sleep_nb);
	register_reboot_notifier(&lazy_reboot_nb);

	lazy_dir = debugfs_create_dir(KBUILD_MODNAME, NULL);
	debugfs_create_file("mode", 0600, lazy_dir, NULL, &mode_fops);
	debugfs_create_file("counters", 0400, lazy_dir, NULL, &counters_fops);
	debugfs_create_file("latency", 0400, lazy_dir, NULL, &latency_fops);
	debugfs_create_file("histogram", 0400, lazy_dir, NULL, &histogram_fops);
	debugfs_create_file("reset", 0200, lazy_dir, NULL, &reset_fops);
	return 0;
}

static void __exit lazy_exit(void)
{
	debugfs_remove_recursive(lazy_dir);
	unregister_reboot_notifier(&lazy_reboot_nb);
	unregister_pm_notifier(&lazy_sleep_nb);
	mutex_lock(&lazy_mutex);
	lazy_set_mode(OFF);
	mutex_unlock(&lazy_mutex);
	lazy_free();
}

module_init(lazy_init);
module_exit(lazy_exit);

MODULE_DESCRIPTION("Lazy TSC deadline: moving a timer later costs no exit");
MODULE_LICENSE("GPL");
