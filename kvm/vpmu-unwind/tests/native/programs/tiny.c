/* A program of three pages, whose address spaces are the fuzz target's corpus. */
static volatile unsigned long sink;

__attribute__((noinline)) static unsigned long depth(unsigned n) {
    volatile char room[24];
    room[n % 24] = n;
    if (n == 0) return room[0];
    return depth(n - 1) + room[n % 24];
}

__attribute__((noinline)) static unsigned long aligned(unsigned n) {
    volatile double __attribute__((aligned(64))) room[8];
    room[n & 7] = n;
    return depth(n) + (unsigned long)room[n & 7];
}

void _start(void) {
    for (;;) sink += aligned(5);
}
