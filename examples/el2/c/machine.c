/* Boot, stage 2, and the exits that have nothing to do with the PMU. */

#include "el2.h"

/* A vCPU that has left its guest, as entry.s stores it. */
struct frame {
	uint64_t x[31], pc, pstate;
};

#define RAM 0x40000000ull
#define GIB (1ull << 30)
#define BLOCK (2ull << 20)
/* The hypervisor's block, and the guest's kernel behind it. */
#define OWN (RAM + BLOCK)
#define GUEST (RAM + 2 * BLOCK)

/* Block descriptors of stage 2 (DDI 0487, D8.3): valid, accessed, readable and writable; normal write-back memory that is
 * inner shareable, or a device. */
#define NORMAL (1 | 0xf << 2 | 3 << 6 | 3 << 8 | 1 << 10)
#define DEVICE (1 | 1 << 2 | 3 << 6 | 1 << 10)
#define TABLE 3

static uint64_t level_1[512] __attribute__((aligned(4096))), level_2[512] __attribute__((aligned(4096)));

/* Maps every address to itself but the hypervisor's own. */
static void stage_2(uint64_t ram_end)
{
	for (uint64_t n = 0; n < 512; n++) {
		uint64_t large = n * GIB, small = RAM + n * BLOCK;

		level_1[n] = large | (large >= RAM && large < ram_end ? NORMAL : DEVICE);
		level_2[n] = small == OWN ? 0 : small | NORMAL;
	}
	level_1[RAM / GIB] = (uint64_t)level_2 | TABLE;
	WRITE(vttbr_el2, level_1);
	/* 39 bits from level 1, 4 KiB granule, write-back walks, 40 physical bits. */
	WRITE(vtcr_el2, 1ull << 31 | 2 << 16 | 3 << 12 | 1 << 10 | 1 << 8 | 1 << 6 | 25);
	__asm__ volatile("dsb ish; tlbi vmalls12e1; dsb ish; isb" : : : "memory");
}

/* Takes the hypervisor's memory out of the device tree, and returns where RAM ends; 0: the tree has no such memory. The
 * memory's node has one range, as QEMU writes it (Devicetree Specification 0.4, chapter 5). */
static uint64_t take_memory(uint32_t *tree)
{
	uint32_t *end = tree + __builtin_bswap32(tree[1]) / 4, *at = tree + __builtin_bswap32(tree[2]) / 4;
	bool in_memory = false;

	while (at < end) {
		uint32_t token = __builtin_bswap32(*at++), bytes;
		uint64_t start, size;

		switch (token) {
		case 1: /* a node begins, with its name: "memory@..." */
			in_memory = *at == (uint32_t)('m' | 'e' << 8 | 'm' << 16 | 'o' << 24);
			while ((*at & 0xff) && (*at & 0xff00) && (*at & 0xff0000) && (*at & 0xff000000))
				at++;
			at++;
			break;
		case 3: /* a property: its length, its name, its value */
			bytes = __builtin_bswap32(at[0]);
			start = (uint64_t)__builtin_bswap32(at[2]) << 32 | __builtin_bswap32(at[3]);
			size = (uint64_t)__builtin_bswap32(at[4]) << 32 | __builtin_bswap32(at[5]);
			if (in_memory && bytes == 16 && start == RAM) {
				at[2] = 0;
				at[3] = __builtin_bswap32(GUEST);
				at[4] = __builtin_bswap32((size - (GUEST - RAM)) >> 32);
				at[5] = __builtin_bswap32(size - (GUEST - RAM));
				return start + size;
			}
			at += 2 + (bytes + 3) / 4;
			break;
		case 2:
		case 4:
			break;
		default:
			return 0;
		}
	}
	return 0;
}

/* HCR_EL2: stage 2; AArch64; physical interrupts come here and virtual ones go to the guest; SMC traps; cache operations by
 * set and way clean, too; pointer authentication and tags do not trap. */
#define HCR (1ull | 1 << 1 | 3 << 3 | 1 << 19 | 1ull << 31 | 3ull << 40 | 1ull << 56)

/* Called by entry.s; returns where the guest begins. */
uint64_t boot(uint32_t *tree)
{
	uint64_t ram_end = take_memory(tree);

	while (ram_end == 0)
		; /* no memory that this hypervisor knows */
	stage_2(ram_end);
	WRITE(cptr_el2, 0x22ff); /* floating point does not trap (DDI 0487, CPTR_EL2 with E2H = 0) */
	if (READ(id_aa64mmfr1_el1) >> 40 & 0xf)
		WRITE(s3_4_c1_c2_2, 1 << 11 | 1 << 14 | 1 << 15); /* HCRX_EL2: MSCEn, TCR2En, SCTLR2En */
	if (READ(id_aa64mmfr0_el1) >> 56 & 0xf) {
		/* HFGRTR_EL2 and HFGWTR_EL2: those bits that trap when they are zero. */
		WRITE(s3_4_c1_c1_4, 0x3ffull << 54 | 1ull << 50);
		WRITE(s3_4_c1_c1_5, 0x3ffull << 54 | 1ull << 50);
	}
	WRITE(cnthctl_el2, 3);
	WRITE(cntvoff_el2, 0);
	WRITE(vpidr_el2, READ(midr_el1));
	WRITE(vmpidr_el2, READ(mpidr_el1));
	WRITE(sctlr_el1, 0x30d00800);
	pmu_init();
	gic_init();
	WRITE(hcr_el2, HCR);
	return GUEST;
}

static void put(const char *text)
{
	while (*text) /* the port (PL011) of QEMU's virt machine, which is never full */
		*(volatile uint32_t *)0x09000000 = *text++;
}

static void number(uint64_t value)
{
	char digits[21], *at = digits + sizeof(digits) - 1;

	for (*at = 0; value || !*at; value /= 10)
		*--at = '0' + value % 10;
	put(at);
}

/* Says what the PMU has cost. */
static void report(void)
{
	uint64_t exits, pmis;

	pmu_statistics(&exits, &pmis);
	put("el2: ");
	number(exits);
	put(" exits by the PMU, ");
	number(pmis);
	put(" PMIs\r\n");
}

/* The PSCI functions that a guest with one CPU needs (Arm DEN 0022). */
static bool is_known(uint64_t call)
{
	return call == 0x84000000 || call == 0x84000006 || call == 0x84000008 || call == 0x84000009 ||
	       call == 0x8400000a;
}

static uint64_t firmware(const uint64_t *x)
{
	register uint64_t x0 __asm__("x0") = x[0], x1 __asm__("x1") = x[1], x2 __asm__("x2") = x[2],
		x3 __asm__("x3") = x[3];

	__asm__ volatile("smc #0" : "+r"(x0), "+r"(x1), "+r"(x2), "+r"(x3) : : "memory");
	return x0;
}

/* ISS of a write of ICC_SGI1R_EL1 (S3_0_C12_C11_5), but for Rt. */
#define SGI1R (3 << 20 | 5 << 17 | 12 << 10 | 11 << 1)

void synchronous(struct frame *frame)
{
	const struct vpmu_el2_vcpu vcpu = {.x = frame->x, .pc = &frame->pc, .pstate = &frame->pstate};
	uint64_t esr = READ(esr_el2), class = esr >> 26 & 0x3f, rt = esr >> 5 & 0x1f;

	pmu_exited();
	if (class == 0x16) { /* HVC */
		frame->x[0] = -1ull;
	} else if (class == 0x17) { /* SMC */
		if (frame->x[0] == 0x84000008) /* SYSTEM_OFF */
			report();
		frame->x[0] = is_known(frame->x[0]) ? firmware(frame->x) : -1ull;
		frame->pc += 4;
	} else if (class == 0x18 && (esr & 0x1ffffff & ~(0x1f << 5)) == SGI1R) {
		WRITE(icc_sgi1r_el1, rt < 31 ? frame->x[rt] : 0);
		frame->pc += 4;
	} else if (!pmu_access(esr, &vcpu)) {
		vpmu_el2_inject(1 << 25, &vcpu); /* an undefined instruction, whatever it was */
	}
}

void interrupt(struct frame *frame)
{
	(void)frame;
	pmu_exited();
	gic_interrupts();
}

/* What a C compiler asks for, and the engine with it. */
void *memset(void *to, int byte, size_t length)
{
	for (char *at = to; length--; at++)
		*(volatile char *)at = byte;
	return to;
}

void *memcpy(void *to, const void *from, size_t length)
{
	for (size_t n = 0; n < length; n++)
		((volatile char *)to)[n] = ((const char *)from)[n];
	return to;
}
