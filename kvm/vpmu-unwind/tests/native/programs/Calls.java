// What Java has of calls: recursion, interfaces, lambdas, a comparator, exceptions.
import java.util.Arrays;
import java.util.function.IntUnaryOperator;

class Calls {
    interface Shape { int area(); }
    record Square(int side) implements Shape { public int area() { return mix(side * side); } }
    record Circle(int radius) implements Shape { public int area() { return mix(radius * 3); } }

    static int mix(int n) { return n ^ n >> 3; }
    static int fib(int n) { return n < 2 ? mix(n) : fib(n - 1) + fib(n - 2); }

    static int each(int n, IntUnaryOperator f) {
        int sum = 0;
        for (int i = 0; i < n; i++) sum += f.applyAsInt(i);
        return sum;
    }

    static int guarded(int n) {
        try {
            if (n % 7 == 0) throw new IllegalStateException("seven");
            return fib(n % 5);
        } catch (IllegalStateException e) {
            return -1;
        }
    }

    static int round(int round, Shape[] shapes, int total) {
        Integer[] numbers = {5, 2, round & 15, 9, 1, 7};
        Arrays.sort(numbers, (a, b) -> a - b);
        return fib(12) + guarded(round) + each(20, i -> shapes[i % 3].area()) + numbers[0] + total;
    }

    public static void main(String[] arguments) {
        Shape[] shapes = {new Square(3), new Circle(4), new Square(5)};
        int total = 0;
        for (int round = 0; total != 12345678; round++) total = round(round, shapes, total) & 0xffff;
        System.out.println(total);
    }
}
