// SPDX-License-Identifier: GPL-2.0
/*
 * Reads a counter by an RDPMC in the text of a module, as drivers out of the
 * kernel's tree do. Reading the parameter "reads" executes the instruction:
 *
 *   counter=INDEX  the counter's index, for RDPMC
 *   count=N        how often one read of "reads" reads the counter
 *   reads          "read N refused N backwards N code BB BB": instructions that
 *                  gave a value, those that were #GP, values below the one
 *                  before, and the instruction's two bytes as they are now
 */
#include <linux/kernel.h>
#include <linux/module.h>
#include <linux/moduleparam.h>
#include <asm/asm.h>

static uint counter;
module_param(counter, uint, 0644);

static uint count = 1000;
module_param(count, uint, 0644);

extern const u8 counter_reader_rdpmc[];

/* One copy: the instruction has a name. */
static noinline __attribute__((__noclone__)) bool try_counter(u64 *value)
{
	u32 low = 0, high = 0, done = 0;

	asm volatile("counter_reader_rdpmc: rdpmc\n\t"
		     "movl $1, %2\n"
		     "1:\n"
		     _ASM_EXTABLE(counter_reader_rdpmc, 1b)
		     : "+a"(low), "+d"(high), "+r"(done)
		     : "c"(counter));
	*value = (u64)high << 32 | low;
	return done;
}

static int reads(char *buffer, const struct kernel_param *parameter)
{
	u64 before = 0, now;
	uint read = 0, refused = 0, backwards = 0, n;

	for (n = 0; n < count; n++) {
		if (!try_counter(&now)) {
			refused++;
			continue;
		}
		read++;
		if (now < before)
			backwards++;
		before = now;
	}
	return sysfs_emit(buffer, "read %u refused %u backwards %u code %02x %02x\n",
			  read, refused, backwards, counter_reader_rdpmc[0],
			  counter_reader_rdpmc[1]);
}

static const struct kernel_param_ops reads_ops = { .get = reads };
module_param_cb(reads, &reads_ops, NULL, 0444);

static int __init counter_reader_init(void)
{
	return 0;
}
module_init(counter_reader_init);

static void __exit counter_reader_exit(void)
{
}
module_exit(counter_reader_exit);

MODULE_DESCRIPTION("Reads a performance counter by RDPMC");
MODULE_LICENSE("GPL");
