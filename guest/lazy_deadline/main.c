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
 * paravirtual:	on a host that offers VPMU_FEATURE_DEADLINE. The deadline in
 *		force is in memory that the host reads when the armed one
 *		expires, so that a halted CPU sleeps on. Where that avoids too
 *		little to pay, IA32_TSC_DEADLINE is written until it does.
 * plain:	writes what the stock driver writes, and measures.
 *
 * The protocol, and why it loses no deadline: vpmu's docs/how/lazy-deadline.md.
 *
 * For Linux 6.1 to 7.3. From 7.1 on the core writes IA32_TSC_DEADLINE itself
 * where a device is coupled to the TSC: this module uncouples it.
 */

#define pr_fmt(fmt) KBUILD_MODNAME ": " fmt

#include <linux/cpu.h>
#include <linux/cpuhotplug.h>
#include <linux/module.h>
#include <linux/mutex.h>
#include <linux/reboot.h>
#include <linux/seq_file.h>
#include <linux/slab.h>
#include <linux/string.h>
#include <linux/suspend.h>
#include <linux/uaccess.h>

#include "lazy_deadline.h"

static const char * const lazy_mode_names[] = {
	[OFF] = "off",
	[PLAIN] = "plain",
	[GUEST_ONLY] = "guest-only",
	[PARAVIRTUAL] = "paravirtual",
};

static char *mode = "guest-only";
module_param(mode, charp, 0444);
MODULE_PARM_DESC(mode, "off, plain, guest-only (default) or paravirtual; later: debugfs lazy_deadline/mode");

DEFINE_PER_CPU(struct lazy_cpu *, lazy_cpus);
enum lazy_mode lazy_mode;

static DEFINE_MUTEX(lazy_mutex);	/* changes of the mode */
static bool lazy_asleep;		/* or about to be: the mode stays off */
static enum cpuhp_state lazy_hotplug;

static int lazy_set_mode(enum lazy_mode new)
{
	int ret;

	lockdep_assert_held(&lazy_mutex);
	if (new == lazy_mode)
		return 0;
	if (new == PARAVIRTUAL &&
	    !(vpmu_host_features() & VPMU_FEATURE_DEADLINE)) {
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

static int lazy_request_mode(const char *name)
{
	int ret = lazy_find_mode(name);

	if (ret < 0)
		return ret;
	mutex_lock(&lazy_mutex);
	ret = lazy_asleep ? -EBUSY : lazy_set_mode(ret);
	mutex_unlock(&lazy_mutex);
	return ret;
}

static int mode_show(struct seq_file *m, void *unused)
{
	seq_printf(m, "%s\n", lazy_mode_names[READ_ONCE(lazy_mode)]);
	return 0;
}

static ssize_t mode_write(struct file *file, const char __user *text,
			  size_t count, loff_t *pos)
{
	char name[16] = "";
	int err;

	if (count >= sizeof(name))
		return -EINVAL;
	if (copy_from_user(name, text, count))
		return -EFAULT;
	err = lazy_request_mode(name);
	return err ?: count;
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

static void lazy_free(void)
{
	int cpu;

	for_each_possible_cpu(cpu)
		kfree(per_cpu(lazy_cpus, cpu));
}

static int __init lazy_allocate(void)
{
	int cpu;

	for_each_possible_cpu(cpu) {
		struct lazy_cpu *t;

		/* kmalloc aligns a power of two to its size: the slot to 64. */
		t = kzalloc_node(roundup_pow_of_two(sizeof(*t)), GFP_KERNEL,
				 cpu_to_node(cpu));
		per_cpu(lazy_cpus, cpu) = t;
		if (!t) {
			lazy_free();
			return -ENOMEM;
		}
	}
	return 0;
}

static int __init lazy_init(void)
{
	int first, err;

	first = lazy_find_mode(mode);
	if (first < 0) {
		pr_err("mode=%s: off, plain, guest-only or paravirtual\n", mode);
		return first;
	}
	err = lazy_find_device();
	if (err)
		return err;
	err = lazy_allocate();
	if (err)
		return err;
	mutex_lock(&lazy_mutex);
	err = lazy_set_mode(first);
	mutex_unlock(&lazy_mutex);
	if (err) {
		lazy_free();
		return err;
	}
	register_pm_notifier(&lazy_sleep_nb);
	register_reboot_notifier(&lazy_reboot_nb);
	lazy_create_files(&mode_fops);
	return 0;
}

static void __exit lazy_exit(void)
{
	lazy_remove_files();
	unregister_reboot_notifier(&lazy_reboot_nb);
	unregister_pm_notifier(&lazy_sleep_nb);
	mutex_lock(&lazy_mutex);
	lazy_set_mode(OFF);
	mutex_unlock(&lazy_mutex);
	lazy_free();
}

module_init(lazy_init);
module_exit(lazy_exit);

MODULE_DESCRIPTION("Lazy TSC deadline: moving a timer later costs no exit (Linux 6.1 to 7.3)");
MODULE_LICENSE("GPL");
