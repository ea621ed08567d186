//! Results and flags of integer instructions (SDM vol. 1, 7.3; vol. 2, each instruction's page).

use super::shadow::{Flags, Known, Value, mask};

/// A result with the flags that come with it.
pub(super) type Computed = (Value, Flags);

const UNKNOWN: Computed = (None, Flags::UNKNOWN);

fn sign_bit(size: usize) -> u64 {
    1 << (8 * size as u32 - 1)
}

/// Returns the flags that follow from a result alone.
fn of_result(bits: u64, size: usize, firm: bool) -> Flags {
    Flags {
        carry: Some(false),
        parity: Some((bits as u8).count_ones().is_multiple_of(2)),
        zero: Some(bits & mask(size) == 0),
        sign: Some(bits & sign_bit(size) != 0),
        overflow: Some(false),
        firm,
    }
}

/// AND, OR, XOR, TEST.
pub(super) fn logic(a: Value, b: Value, size: usize, f: fn(u64, u64) -> u64) -> Computed {
    let (Some(a), Some(b)) = (a, b) else {
        return UNKNOWN;
    };
    let (bits, firm) = (f(a.bits, b.bits) & mask(size), a.firm && b.firm);
    (Some(Known { bits, firm }), of_result(bits, size, firm))
}

/// ADD; ADC with a carry.
pub(super) fn add(a: Value, b: Value, carry: bool, size: usize) -> Computed {
    let (Some(a), Some(b)) = (a, b) else {
        return UNKNOWN;
    };
    let firm = a.firm && b.firm;
    let (a, b) = (a.bits & mask(size), b.bits & mask(size));
    let wide = u128::from(a) + u128::from(b) + u128::from(carry);
    let bits = wide as u64 & mask(size);
    let flags = Flags {
        carry: Some(wide > u128::from(mask(size))),
        overflow: Some((a ^ bits) & (b ^ bits) & sign_bit(size) != 0),
        ..of_result(bits, size, firm)
    };
    (Some(Known { bits, firm }), flags)
}

/// SUB, CMP, NEG; SBB with a borrow.
pub(super) fn subtract(a: Value, b: Value, borrow: bool, size: usize) -> Computed {
    let (Some(a), Some(b)) = (a, b) else {
        return UNKNOWN;
    };
    let firm = a.firm && b.firm;
    let (a, b) = (a.bits & mask(size), b.bits & mask(size));
    let bits = a.wrapping_sub(b).wrapping_sub(u64::from(borrow)) & mask(size);
    let flags = Flags {
        carry: Some(u128::from(a) < u128::from(b) + u128::from(borrow)),
        overflow: Some((a ^ b) & (a ^ bits) & sign_bit(size) != 0),
        ..of_result(bits, size, firm)
    };
    (Some(Known { bits, firm }), flags)
}

/// INC and DEC keep the carry flag of `before`.
pub(super) fn keeping_carry((value, flags): Computed, before: &Flags) -> Computed {
    let flags = Flags {
        carry: before.carry,
        firm: flags.firm && before.firm,
        ..flags
    };
    (value, flags)
}

/// The direction of a shift.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Shift {
    Left,
    Right,
    /// To the right, with copies of the sign.
    Arithmetic,
}

/// SHL, SHR, SAR. A count of 0 leaves the flags of `before`.
pub(super) fn shift(a: Value, count: Value, size: usize, way: Shift, before: &Flags) -> Computed {
    let (Some(a), Some(count)) = (a, count) else {
        return UNKNOWN;
    };
    let firm = a.firm && count.firm;
    let n = (count.bits & if size == 8 { 0x3f } else { 0x1f }) as u32;
    let a = a.bits & mask(size);
    if n == 0 {
        let firm_flags = before.firm && firm;
        let flags = Flags {
            firm: firm_flags,
            ..*before
        };
        return (Some(Known { bits: a, firm }), flags);
    }
    let width = 8 * size as u32;
    let signed = {
        let unused = 64 - width;
        (a << unused).cast_signed() >> unused
    };
    let (bits, out) = match way {
        Shift::Left => {
            let wide = u128::from(a) << n;
            (wide as u64, wide >> width & 1 != 0)
        }
        Shift::Right => (a >> n, a >> (n - 1) & 1 != 0),
        Shift::Arithmetic => (
            (signed >> n.min(63)).cast_unsigned(),
            signed >> (n - 1).min(63) & 1 != 0,
        ),
    };
    let bits = bits & mask(size);
    let flags = Flags {
        // Undefined where all bits are shifted out, but for SAR.
        carry: (n < width || way == Shift::Arithmetic).then_some(out),
        // Defined for a shift by one only.
        overflow: (n == 1).then(|| match way {
            Shift::Left => (bits & sign_bit(size) != 0) != out,
            Shift::Right => a & sign_bit(size) != 0,
            Shift::Arithmetic => false,
        }),
        ..of_result(bits, size, firm)
    };
    (Some(Known { bits, firm }), flags)
}

/// IMUL with two or three operands.
pub(super) fn multiply(a: Value, b: Value, size: usize) -> Computed {
    let (Some(a), Some(b)) = (a, b) else {
        return UNKNOWN;
    };
    let firm = a.firm && b.firm;
    let bits = a.bits.wrapping_mul(b.bits) & mask(size);
    let product = i128::from(sign_extend(a.bits, size).cast_signed())
        * i128::from(sign_extend(b.bits, size).cast_signed());
    let fits = product == i128::from(sign_extend(bits, size).cast_signed());
    let flags = Flags {
        carry: Some(!fits),
        overflow: Some(!fits),
        firm,
        ..Flags::UNKNOWN
    };
    (Some(Known { bits, firm }), flags)
}

/// Returns the 64 bits of a signed number of `size` bytes.
pub(super) fn sign_extend(bits: u64, size: usize) -> u64 {
    let unused = 64 - 8 * size.clamp(1, 8) as u32;
    ((bits << unused).cast_signed() >> unused).cast_unsigned()
}

#[cfg(test)]
mod tests {
    use super::super::shadow::firm;
    use super::*;

    fn flags((_, flags): Computed) -> [Option<bool>; 5] {
        [
            flags.carry,
            flags.parity,
            flags.zero,
            flags.sign,
            flags.overflow,
        ]
    }

    /// Returns bits 0, 2, 6, 7 and 11 of RFLAGS.
    fn of(rflags: u64) -> [Option<bool>; 5] {
        [0, 2, 6, 7, 11].map(|bit| Some(rflags >> bit & 1 != 0))
    }

    /// Compares with this processor's own instructions.
    #[test]
    #[expect(unsafe_code, reason = "the processor's own flags")]
    fn results_and_flags_are_the_processors() {
        macro_rules! native {
            ($text:literal, $a:expr, $b:expr) => {{
                let (mut a, rflags): (u64, u64);
                // SAFETY: registers, and a word of the stack.
                unsafe {
                    std::arch::asm!($text, "pushfq", "pop {f}", a = inout(reg) $a => a, b = in(reg) $b, f = out(reg) rflags)
                }
                a &= mask(4);
                (a, of(rflags))
            }};
        }
        let numbers = [
            0_u64,
            1,
            2,
            0x7f,
            0x80,
            0x7fff_ffff,
            0x8000_0000,
            0xffff_ffff,
        ];
        for a in numbers {
            for b in numbers {
                let (x, y) = (firm(a), firm(b));
                let pairs = [
                    (native!("add {a:e}, {b:e}", a, b), add(x, y, false, 4)),
                    (native!("sub {a:e}, {b:e}", a, b), subtract(x, y, false, 4)),
                    (native!("stc; adc {a:e}, {b:e}", a, b), add(x, y, true, 4)),
                    (
                        native!("stc; sbb {a:e}, {b:e}", a, b),
                        subtract(x, y, true, 4),
                    ),
                    (
                        native!("and {a:e}, {b:e}", a, b),
                        logic(x, y, 4, |a, b| a & b),
                    ),
                    (
                        native!("xor {a:e}, {b:e}", a, b),
                        logic(x, y, 4, |a, b| a ^ b),
                    ),
                    (native!("imul {a:e}, {b:e}", a, b), multiply(x, y, 4)),
                ];
                for (n, ((result, expected), computed)) in pairs.into_iter().enumerate() {
                    assert_eq!(
                        computed.0.map(|known| known.bits),
                        Some(result),
                        "{n} {a:x} {b:x}"
                    );
                    agrees(computed, expected, &format!("{n} {a:x} {b:x}"));
                }
            }
            for (way, native) in [
                (Shift::Left, native!("shl {a:e}, 5 /* {b} */", a, 0_u64)),
                (Shift::Right, native!("shr {a:e}, 5 /* {b} */", a, 0_u64)),
                (
                    Shift::Arithmetic,
                    native!("sar {a:e}, 5 /* {b} */", a, 0_u64),
                ),
            ] {
                let computed = shift(firm(a), firm(5), 4, way, &Flags::UNKNOWN);
                assert_eq!(
                    computed.0.map(|known| known.bits),
                    Some(native.0),
                    "{way:?} {a:x}"
                );
                agrees(computed, native.1, &format!("{way:?} {a:x}"));
            }
        }
    }

    /// Checks the flags that are known.
    fn agrees(computed: Computed, expected: [Option<bool>; 5], what: &str) {
        for (known, expected) in flags(computed).into_iter().zip(expected) {
            assert!(known.is_none() || known == expected, "{what}: {computed:?}");
        }
    }

    #[test]
    fn what_is_not_known_makes_nothing_known() {
        let (value, after) = add(None, firm(1), false, 8);
        assert_eq!((value, flags((value, after))), (None, [None; 5]));
    }
}
