// The program of the published page (2019): main calls foo and bar, foo calls bar, bar calls qux, and qux calls random().
#include <stdlib.h>

#define APART static __attribute__((noinline, noclone)) unsigned long

static volatile unsigned long work;

// What random() returns decides how long a function takes, so that no sampling period beats with the calls.
static inline __attribute__((always_inline)) void spin(unsigned long rounds)
{
    while (rounds--)
        work += rounds;
}

APART qux(void)
{
    unsigned long number = random();

    spin(number & 31);
    number += random();
    spin(16);
    return number;
}

APART bar(void)
{
    unsigned long number = qux();

    spin(20 + number % 16);
    return number + 1;
}

APART foo(void)
{
    unsigned long number = bar();

    spin(16 + number % 8);
    return number ^ work;
}

int main(int count, char **arguments)
{
    unsigned long rounds = count > 1 ? strtoul(arguments[1], NULL, 10) : 1, sum = 0;

    while (rounds--) {
        sum += foo();
        sum += bar();
        spin(64 + sum % 8);
    }
    return sum == 0;
}
