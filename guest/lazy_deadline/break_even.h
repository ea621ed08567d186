/* SPDX-License-Identifier: GPL-2.0 */
/*
 * Whether the slot pays, learned from a CPU's own deadlines: BreakEven of vpmu's
 * crate lazy-deadline, line by line, where the reasons stand and the properties
 * are tested. A test of that crate compares the two. Nothing of Linux but types.
 */
#ifndef BREAK_EVEN_H
#define BREAK_EVEN_H

/* Deadlines after which the share of avoided ones is computed. */
#define BREAK_EVEN_WINDOW	256
/* Windows in a row that change the way. */
#define BREAK_EVEN_WINDOWS	2
/* Percent by which the share must exceed the break-even to come back. */
#define BREAK_EVEN_MARGIN	5

/* What to do with a deadline. */
enum lazy_way {
	WAY_LAZY,	/* by the slot */
	WAY_PLAIN,	/* IA32_TSC_DEADLINE */
	WAY_FALL_BACK,	/* disarm the slot's register, then as WAY_PLAIN */
	WAY_COME_BACK,	/* disarm IA32_TSC_DEADLINE, then as WAY_LAZY */
};

/* One CPU's choice. Zeroes: the slot, always. */
struct break_even {
	u64 armed;	/* when the host would read the slot; 0: it would not */
	u64 wanted;	/* the last deadline; 0: cancelled */
	u32 least;	/* percent that must be avoided; 0: none */
	u32 asked;	/* deadlines in this window */
	u32 avoided;	/* of these: the slot avoids the write */
	u32 against;	/* windows in a row that speak against the present way */
	bool plain;	/* the present way: IA32_TSC_DEADLINE */

	/* Statistics. */
	u64 plain_deadlines, fell_back, came_back;
};

/* Whether the slot avoids the write, with a prompt host. */
static inline bool break_even_note(struct break_even *b, u64 deadline, u64 now)
{
	bool avoided;

	/* The host has looked: it has moved its timer, or fired. */
	if (b->armed <= now)
		b->armed = b->wanted > now ? b->wanted : 0;
	b->wanted = deadline;
	avoided = b->armed && b->armed <= deadline;
	if (!avoided)
		b->armed = deadline;
	return avoided;
}

/* Whether the way changes with this deadline. */
static inline bool break_even_learn(struct break_even *b, bool is_avoided)
{
	u32 avoided, back;
	bool against;

	b->asked++;
	b->avoided += is_avoided;
	if (b->asked < BREAK_EVEN_WINDOW)
		return false;
	avoided = 100 * b->avoided;
	b->asked = 0;
	b->avoided = 0;
	/* With a break-even near 100 the margin asks for all. */
	back = b->least + BREAK_EVEN_MARGIN;
	if (back > 100)
		back = 100;
	against = b->plain ? avoided >= back * BREAK_EVEN_WINDOW
			   : avoided < b->least * BREAK_EVEN_WINDOW;
	b->against = against ? b->against + 1 : 0;
	if (b->against < BREAK_EVEN_WINDOWS)
		return false;
	b->against = 0;
	return true;
}

/* What to do with @deadline, not 0, that is asked for at @now of the TSC. */
static inline enum lazy_way break_even_choose(struct break_even *b,
					      u64 deadline, u64 now)
{
	bool changes = break_even_learn(b, break_even_note(b, deadline, now));

	b->plain ^= changes;
	b->plain_deadlines += b->plain;
	b->fell_back += b->plain && changes;
	b->came_back += !b->plain && changes;
	if (b->plain)
		return changes ? WAY_FALL_BACK : WAY_PLAIN;
	return changes ? WAY_COME_BACK : WAY_LAZY;
}

/* The last deadline is wanted no more. The way stays. */
static inline void break_even_cancel(struct break_even *b)
{
	b->wanted = 0;
}

#endif
