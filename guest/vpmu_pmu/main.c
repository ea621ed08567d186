// SPDX-License-Identifier: GPL-2.0
/*
 * A PMU in a page that is shared with the host
 *
 * In a virtual machine each access of a PMU's register is an exit. This driver
 * writes what it wants into memory, finds there what the host has counted, and
 * rings one doorbell where something must change at once: once or twice for a
 * context switch, and never for a sample.
 *
 * It stands in for the processor's own PMU ("cpu") where the guest was given
 * none, so that perf works as it is. The protocol: vpmu's
 * docs/how/paravirtual-pmu.md.
 */

#define pr_fmt(fmt) KBUILD_MODNAME ": " fmt

#include <linux/cpu.h>
#include <linux/cpuhotplug.h>
#include <linux/gfp.h>
#include <linux/module.h>
#include <linux/moduleparam.h>
#include <linux/reboot.h>
#include <linux/static_call.h>
#include <linux/syscore_ops.h>
#include <linux/sysfs.h>

#include <asm/io.h>
#include <asm/nmi.h>
#include <asm/perf_event.h>

#include "vpmu_pmu.h"

DEFINE_PER_CPU(struct vpmu_pmu_cpu, vpmu_pmu_cpus);
static DEFINE_PER_CPU(struct vpmu_pmu_page *, vpmu_pmu_pages);
static DEFINE_PER_CPU(struct vpmu_pmu_record *, vpmu_pmu_buffers);

unsigned int vpmu_pmu_counters;
u32 vpmu_pmu_features;
u32 vpmu_pmu_events;

/* /sys/module/vpmu_pmu/parameters/: of all CPUs together. */
static int vpmu_pmu_show_doorbells(char *buf, const struct kernel_param *kp)
{
	u64 sum = 0;
	int cpu;

	for_each_possible_cpu(cpu)
		sum += per_cpu(vpmu_pmu_cpus, cpu).doorbells;
	return sysfs_emit(buf, "%llu\n", sum);
}

static int vpmu_pmu_show_interrupts(char *buf, const struct kernel_param *kp)
{
	u64 sum = 0;
	int cpu;

	for_each_possible_cpu(cpu)
		sum += per_cpu(vpmu_pmu_cpus, cpu).interrupts;
	return sysfs_emit(buf, "%llu\n", sum);
}

static const struct kernel_param_ops vpmu_pmu_doorbells = {
	.get = vpmu_pmu_show_doorbells,
};

static const struct kernel_param_ops vpmu_pmu_interrupts = {
	.get = vpmu_pmu_show_interrupts,
};

module_param_cb(doorbells, &vpmu_pmu_doorbells, NULL, 0444);
MODULE_PARM_DESC(doorbells, "how often the doorbell was rung");
module_param_cb(interrupts, &vpmu_pmu_interrupts, NULL, 0444);
MODULE_PARM_DESC(interrupts, "how many NMIs the host has sent");

/* On the CPU, with interrupts off. */
static void vpmu_pmu_attach(void)
{
	struct vpmu_pmu_cpu *c = this_cpu_ptr(&vpmu_pmu_cpus);
	struct vpmu_pmu_page *page = __this_cpu_read(vpmu_pmu_pages);

	memset(page, 0, sizeof(*page));
	c->buffer = __this_cpu_read(vpmu_pmu_buffers);
	if (c->buffer)
		page->buffer = __pa(c->buffer);
	page->tag = VPMU_PMU_TAG;
	if (wrmsrq_safe(VPMU_MSR_PMU_PAGE, __pa(page) | VPMU_PMU_PAGE_ENABLE)) {
		pr_err("cpu%d: the host takes no page: no counters there\n",
		       smp_processor_id());
		vpmu_pmu_lose();
		return;
	}
	WRITE_ONCE(c->page, page);
}

static void vpmu_pmu_detach(void *unused)
{
	struct vpmu_pmu_cpu *c = this_cpu_ptr(&vpmu_pmu_cpus);

	if (!c->page)
		return;
	wrmsrq_safe(VPMU_MSR_PMU_PAGE, 0);
	c->page->tag = 0;
	WRITE_ONCE(c->page, NULL);
}

static int vpmu_pmu_starting(unsigned int cpu)
{
	vpmu_pmu_attach();
	vpmu_pmu_resume(this_cpu_ptr(&vpmu_pmu_cpus));
	return 0;
}

static int vpmu_pmu_dying(unsigned int cpu)
{
	vpmu_pmu_detach(NULL);
	return 0;
}

/*
 * Since Linux 6.19, and in older kernels of distributions, the callbacks have an
 * argument, and what is registered is apart from them.
 */
#ifdef HAVE_register_syscore
#define SYSCORE_ARGUMENT	void *unused
#else
#define SYSCORE_ARGUMENT	void
#define register_syscore	register_syscore_ops
#define unregister_syscore	unregister_syscore_ops
#endif

/* The last CPU goes to sleep, and comes back with no page shared. */
static int vpmu_pmu_sleep(SYSCORE_ARGUMENT)
{
	if (this_cpu_read(vpmu_pmu_cpus.page))
		vpmu_pmu_pause(this_cpu_ptr(&vpmu_pmu_cpus));
	vpmu_pmu_detach(NULL);
	return 0;
}

static void vpmu_pmu_wake(SYSCORE_ARGUMENT)
{
	vpmu_pmu_attach();
	if (this_cpu_read(vpmu_pmu_cpus.page))
		vpmu_pmu_resume(this_cpu_ptr(&vpmu_pmu_cpus));
}

#ifdef HAVE_register_syscore
static const struct syscore_ops vpmu_pmu_syscore_ops = {
	.suspend = vpmu_pmu_sleep,
	.resume = vpmu_pmu_wake,
};

static struct syscore vpmu_pmu_syscore = {
	.ops = &vpmu_pmu_syscore_ops,
};
#else
static struct syscore_ops vpmu_pmu_syscore = {
	.suspend = vpmu_pmu_sleep,
	.resume = vpmu_pmu_wake,
};
#endif

/* Before another kernel, which knows of no page. */
static int vpmu_pmu_reboot(struct notifier_block *nb, unsigned long action,
			   void *data)
{
	on_each_cpu(vpmu_pmu_detach, NULL, 1);
	return NOTIFY_DONE;
}

static struct notifier_block vpmu_pmu_reboot_nb = {
	.notifier_call = vpmu_pmu_reboot,
};

/* Linux 7.3 exports it to KVM alone. */
DEFINE_STATIC_CALL_NULL(vpmu_pmu_capability, perf_get_x86_pmu_capability);

static int vpmu_pmu_discover(void)
{
	void *capability = vpmu_find_function("perf_get_x86_pmu_capability");
	struct x86_pmu_capability other;
	u32 eax, ebx, ecx, edx;

	if (!(vpmu_host_features() & VPMU_FEATURE_PMU)) {
		pr_err("this host has no paravirtual PMU\n");
		return -ENODEV;
	}
	cpuid(VPMU_CPUID_PMU, &eax, &ebx, &ecx, &edx);
	if (ecx != VPMU_PMU_LAYOUT) {
		pr_err("this host's PMU has layout %u, not %u\n", ecx,
		       VPMU_PMU_LAYOUT);
		return -ENODEV;
	}
	if (!capability) {
		pr_err("cannot find perf_get_x86_pmu_capability: are kprobes permitted?\n");
		return -ENOENT;
	}
	static_call_update(vpmu_pmu_capability, capability);
	static_call(vpmu_pmu_capability)(&other);
	if (other.num_counters_gp) {
		pr_err("this guest has a PMU: start it without one\n");
		return -EBUSY;
	}
	vpmu_pmu_features = eax;
	vpmu_pmu_events = ebx;
	vpmu_pmu_counters = min_t(u32, eax & VPMU_PMU_COUNTERS, VPMU_PMU_MOST);
	return 0;
}

static void vpmu_pmu_free(void)
{
	int cpu;

	for_each_possible_cpu(cpu) {
		free_page((unsigned long)per_cpu(vpmu_pmu_pages, cpu));
		free_pages((unsigned long)per_cpu(vpmu_pmu_buffers, cpu),
			   VPMU_PMU_BUFFER_ORDER);
	}
}

static int vpmu_pmu_alloc(void)
{
	int cpu;

	for_each_possible_cpu(cpu) {
		void *page = (void *)get_zeroed_page(GFP_KERNEL);

		if (!page) {
			vpmu_pmu_free();
			return -ENOMEM;
		}
		per_cpu(vpmu_pmu_pages, cpu) = page;
		/* Without a buffer each sample is an interrupt. */
		if (vpmu_pmu_features & VPMU_PMU_RECORDS)
			per_cpu(vpmu_pmu_buffers, cpu) =
				(void *)__get_free_pages(GFP_KERNEL | __GFP_ZERO,
							 VPMU_PMU_BUFFER_ORDER);
	}
	return 0;
}

static int __init vpmu_pmu_init(void)
{
	int err;

	err = vpmu_pmu_discover();
	if (err)
		return err;
	err = vpmu_pmu_find_core();
	if (err)
		return err;
	err = vpmu_pmu_alloc();
	if (err)
		return err;
	err = register_nmi_handler(NMI_LOCAL, vpmu_pmu_nmi, 0, "vpmu_pmu");
	if (err)
		goto free;
	/* Of the processor's own PMU, which is not there. */
	err = cpuhp_setup_state(CPUHP_AP_PERF_X86_STARTING, "vpmu_pmu:starting",
				vpmu_pmu_starting, vpmu_pmu_dying);
	if (err)
		goto unregister_nmi;
	err = -ENODEV;
	if (vpmu_pmu_gone)
		goto remove_state;
	err = perf_pmu_register(&vpmu_pmu, "cpu", PERF_TYPE_RAW);
	if (err)
		goto remove_state;
	register_syscore(&vpmu_pmu_syscore);
	register_reboot_notifier(&vpmu_pmu_reboot_nb);
	pr_info("%u counters, events %#x%s%s\n", vpmu_pmu_counters,
		vpmu_pmu_events,
		vpmu_pmu_features & VPMU_PMU_RINGS ? ", rings" : "",
		vpmu_pmu_features & VPMU_PMU_RAW ? ", raw events" : "");
	return 0;

remove_state:
	cpuhp_remove_state(CPUHP_AP_PERF_X86_STARTING);
	vpmu_pmu_end_losing();
unregister_nmi:
	unregister_nmi_handler(NMI_LOCAL, "vpmu_pmu");
free:
	vpmu_pmu_free();
	return err;
}

/* No event is left: each holds the module (vpmu_pmu_keep_module). */
static void __exit vpmu_pmu_exit(void)
{
	unregister_reboot_notifier(&vpmu_pmu_reboot_nb);
	unregister_syscore(&vpmu_pmu_syscore);
	perf_pmu_unregister(&vpmu_pmu);
	cpuhp_remove_state(CPUHP_AP_PERF_X86_STARTING);
	vpmu_pmu_end_losing();
	unregister_nmi_handler(NMI_LOCAL, "vpmu_pmu");
	vpmu_pmu_free();
}

module_init(vpmu_pmu_init);
module_exit(vpmu_pmu_exit);

MODULE_DESCRIPTION("vpmu's paravirtual PMU");
MODULE_LICENSE("GPL");
