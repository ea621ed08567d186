// What Go has of calls: recursion, interfaces, closures, a callback of sort, defer and recover.
package main

import (
	"fmt"
	"runtime"
	"sort"
	"strings"
)

type shape interface{ area() int }
type square struct{ side int }
type circle struct{ radius int }

//go:noinline
func (s square) area() int { return mix(s.side * s.side) }

//go:noinline
func (c circle) area() int { return mix(c.radius * 3) }

//go:noinline
func mix(n int) int { return n ^ n>>3 }

//go:noinline
func fib(n int) int {
	if n < 2 {
		return mix(n)
	}
	return fib(n-1) + fib(n-2)
}

//go:noinline
func each(n int, f func(int) int) (sum int) {
	for i := 0; i < n; i++ {
		sum += f(i)
	}
	return sum
}

//go:noinline
func guarded(n int) (sum int) {
	defer func() {
		if recover() != nil {
			sum = -1
		}
	}()
	if n%7 == 0 {
		panic("seven")
	}
	return fib(n % 5)
}

func main() {
	// The thread that is stepped keeps the goroutine.
	runtime.LockOSThread()
	total := 0
	shapes := []shape{square{3}, circle{4}, square{5}}
	for round := 0; ; round++ {
		total += fib(12) + guarded(round)
		total += each(20, func(i int) int { return shapes[i%3].area() + total&1 })
		numbers := []int{5, 2, round & 15, 9, 1, 7}
		sort.Slice(numbers, func(a, b int) bool { return numbers[a] < numbers[b] })
		words := strings.Fields("calls that have not returned")
		sort.Strings(words)
		if total == -1 {
			fmt.Println(total, words)
		}
	}
}
