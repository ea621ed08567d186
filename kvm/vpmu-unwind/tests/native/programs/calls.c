/* What C has of calls: recursion, callbacks, alloca, signals, longjmp, tail calls, realigned frames. */
#include <alloca.h>
#include <setjmp.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define NOINLINE __attribute__((noinline, noclone))

static volatile unsigned long sink;

NOINLINE static unsigned long fib(unsigned n) { return n < 2 ? n : fib(n - 1) + fib(n - 2); }

NOINLINE static int descending(const void *a, const void *b) {
    sink += *(const int *)a;
    return *(const int *)b - *(const int *)a;
}

NOINLINE static void sort(void) {
    int numbers[64];
    for (int i = 0; i < 64; i++) numbers[i] = i * 37 % 61;
    qsort(numbers, 64, sizeof *numbers, descending);
    sink += numbers[3];
}

NOINLINE static void variable(size_t n) {
    char *room = alloca(n * 16 + 1);
    memset(room, 1, n * 16);
    room[n * 16] = 0;
    sink += strlen(room);
    if (n > 1) variable(n - 1);
    sink += room[0];
}

NOINLINE static void realigned(int n) {
    double __attribute__((aligned(64))) room[8];
    for (int i = 0; i < 8; i++) room[i] = i * n;
    if (n > 0) realigned(n - 1);
    sink += (unsigned long)room[n & 7];
}

static void on_signal(int number) { sink += fib(6) + number; }

NOINLINE static void leaf(unsigned long n) { sink += n; }
NOINLINE static void middle(unsigned long n) { sink ^= n; leaf(n + 1); }
NOINLINE static void tail(unsigned long n) { sink += n; middle(n * 3); }

static jmp_buf back;
NOINLINE static void jump(int n) {
    if (n == 0) longjmp(back, 1);
    jump(n - 1);
    sink++;
}

int main(void) {
    signal(SIGUSR1, on_signal);
    for (int round = 0; round < 40; round++) {
        sink += fib(9);
        sort();
        variable(6);
        realigned(5);
        raise(SIGUSR1);
        for (int i = 0; i < 20; i++) tail(i);
        if (setjmp(back) == 0) jump(7);
        char text[64];
        snprintf(text, sizeof text, "%d %s %g", round, "text", round * 0.5);
        sink += strlen(text);
        free(malloc(100 + round));
    }
    return sink == 42;
}
