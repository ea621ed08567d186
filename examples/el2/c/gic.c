/* Physical interrupts (GICv3): each is taken here and goes on into a list register. Distributor and redistributor are the
 * guest's. */

#include "el2.h"

/* The redistributor's frame of SGIs and PPIs on QEMU's virt machine, and the maintenance interrupt's PPI. */
#define ISENABLER0 (0x080b0000 + 0x100)
#define MAINTENANCE 25
/* INTIDs from here on say that there is none. */
#define SPECIAL 1020
/* SGIs have nothing to deactivate. */
#define SGIS 16

/* List registers (ICH_LR<n>_EL2): pending; group 1; its deactivation deactivates the physical interrupt. */
#define PENDING (1ull << 62)
#define GROUP_1 (1ull << 60)
#define HARDWARE (1ull << 61)
#define PRIORITY (0x80ull << 48)

/* ICH_HCR_EL2: on, and the maintenance interrupt where nothing is pending any more. */
#define ON 1
#define NO_PENDING (1 << 3)

/* Interrupts that wait for a list register, by INTID. */
static uint32_t waiting[32];

#define EACH(x) x(0) x(1) x(2) x(3) x(4) x(5) x(6) x(7) x(8) x(9) x(10) x(11) x(12) x(13) x(14) x(15)

static uint64_t read_lr(unsigned int n)
{
	if (n > (READ(ich_vtr_el2) & 0x1f))
		return 0;
	switch (n) {
#define READ_LR(n)      \
	case n:         \
		return READ(ich_lr##n##_el2);
		EACH(READ_LR)
	}
	return 0;
}

static void write_lr(unsigned int n, uint64_t value)
{
	switch (n) {
#define WRITE_LR(n)                             \
	case n:                                 \
		WRITE(ich_lr##n##_el2, value);  \
		break;
		EACH(WRITE_LR)
	}
}

void gic_init(void)
{
	WRITE(icc_sre_el2, 0xf);
	WRITE(icc_pmr_el1, 0xff);
	/* EOImode: an end of interrupt drops the priority, and the guest deactivates. */
	WRITE(icc_ctlr_el1, 1 << 1);
	WRITE(icc_igrpen1_el1, 1);
	WRITE(ich_vmcr_el2, 0);
	WRITE(ich_hcr_el2, ON);
}

/* Gives the guest an interrupt; with `hardware` the guest's deactivation is the physical one's. */
static void inject(uint64_t intid, bool hardware)
{
	uint64_t empty = READ(ich_elrsr_el2);

	if (empty == 0) {
		waiting[intid / 32 % 32] |= 1u << intid % 32;
		return;
	}
	write_lr(__builtin_ctz(empty), PENDING | GROUP_1 | PRIORITY | (hardware ? HARDWARE | intid << 32 : 0) | intid);
}

/* Moves interrupts that wait into list registers, as long as there are any. */
static void refill(void)
{
	bool full = false;

	for (unsigned int n = 0; n < 32; n++) {
		while (waiting[n] != 0 && !full) {
			full = READ(ich_elrsr_el2) == 0;
			if (!full) {
				uint64_t intid = 32 * n + __builtin_ctz(waiting[n]);

				waiting[n] &= waiting[n] - 1;
				inject(intid, intid >= SGIS && (intid != PPI || IS_WIRED));
			}
		}
	}
	if (full) /* The guest has disabled the maintenance interrupt with all others. */
		*(volatile uint32_t *)ISENABLER0 = 1u << MAINTENANCE;
	WRITE(ich_hcr_el2, full ? ON | NO_PENDING : ON);
}

/* Takes what is pending. */
void gic_interrupts(void)
{
	/* Each that is taken is active then, and comes no second time: the loop ends. */
	for (;;) {
		uint64_t intid = READ(icc_iar1_el1) & 0xffffff;
		bool is_guests;

		if (intid >= SPECIAL)
			break;
		is_guests = intid == PPI ? pmu_interrupt() : intid != MAINTENANCE;
		WRITE(icc_eoir1_el1, intid);
		if (intid < SGIS || !is_guests)
			WRITE(icc_dir_el1, intid);
		if (is_guests)
			inject(intid, intid >= SGIS);
	}
	refill();
}

/* Makes the virtual interrupt of the guest's PMU agree with a computed level. */
void gic_set_level(bool level)
{
	for (unsigned int n = 0; n < 16; n++) {
		uint64_t value = read_lr(n);

		if (value >> 62 != 0 && (value & 0xffffffff) == PPI) {
			/* Pending again, behind the one that the guest handles. */
			write_lr(n, level ? value | PENDING : value & ~PENDING);
			return;
		}
	}
	if (level)
		inject(PPI, false);
	else
		waiting[0] &= ~(1u << PPI);
}
