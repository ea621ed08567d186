// SPDX-License-Identifier: GPL-2.0
/* The files in debugfs: counters, and latencies to the handler. */

#include <linux/cpu.h>
#include <linux/debugfs.h>
#include <linux/math64.h>
#include <linux/module.h>
#include <linux/seq_file.h>
#include <linux/slab.h>
#include <linux/smp.h>

#include <asm/tsc.h>

#include "lazy_deadline.h"

static struct dentry *lazy_folder;

/* The lowest latency in @bucket. */
static u64 lazy_bucket(unsigned int bucket)
{
	unsigned int power = bucket >> HIST_BITS;
	u64 step = bucket & (HIST_STEPS - 1);

	return power ? (step + HIST_STEPS) << (power - 1) : step;
}

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

static u64 lazy_ns(u64 ticks)
{
	return mul_u64_u32_div(ticks, USEC_PER_SEC, tsc_khz);
}

static int break_even_show(struct seq_file *m, void *unused)
{
	int cpu;

	seq_puts(m, "cpu slot_ns msr_ns least_percent way plain fell_back came_back weighed\n");
	for_each_possible_cpu(cpu) {
		struct lazy_cpu *t = per_cpu(lazy_cpus, cpu);
		struct break_even *b = &t->choice;

		seq_printf(m, "%d %llu %llu %u %s %llu %llu %llu %llu\n", cpu,
			   lazy_ns(t->slot_cost), lazy_ns(t->msr_cost), b->least,
			   READ_ONCE(b->plain) ? "plain" : "slot",
			   READ_ONCE(b->plain_deadlines),
			   READ_ONCE(b->fell_back), READ_ONCE(b->came_back),
			   READ_ONCE(t->weighed));
	}
	return 0;
}
DEFINE_SHOW_ATTRIBUTE(break_even);

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
		/* count is the buckets' sum, while other CPUs go on counting. */
		for (i = 0; i < HIST_BUCKETS; i++) {
			u64 n = READ_ONCE(l->buckets[i]);

			sum->buckets[i] += n;
			sum->count += n;
		}
	}
	return sum;
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
	t->choice.plain_deadlines = 0;
	t->choice.fell_back = 0;
	t->choice.came_back = 0;
	t->weighed = 0;
}

static void lazy_clear_here(void *unused)
{
	lazy_clear(this_cpu_read(lazy_cpus));
}

static ssize_t reset_write(struct file *file, const char __user *text,
			   size_t count, loff_t *pos)
{
	int cpu;

	cpus_read_lock();
	on_each_cpu(lazy_clear_here, NULL, 1);
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

void lazy_create_files(const struct file_operations *mode)
{
	struct dentry *d = debugfs_create_dir(KBUILD_MODNAME, NULL);

	debugfs_create_file("mode", 0600, d, NULL, mode);
	debugfs_create_file("counters", 0400, d, NULL, &counters_fops);
	debugfs_create_file("break_even", 0400, d, NULL, &break_even_fops);
	debugfs_create_file("latency", 0400, d, NULL, &latency_fops);
	debugfs_create_file("histogram", 0400, d, NULL, &histogram_fops);
	debugfs_create_file("reset", 0200, d, NULL, &reset_fops);
	lazy_folder = d;
}

void lazy_remove_files(void)
{
	debugfs_remove_recursive(lazy_folder);
}
