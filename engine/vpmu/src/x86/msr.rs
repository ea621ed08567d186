//! The MSRs of a PMU, each said once: a vendor's table makes its type.

/// Defines `Msr` by one table. First those that each counter has, with their name before the counter's number, the address of
/// the first, how far each is behind the one before, and how many there are; then those that there is one of.
macro_rules! msrs {
    ($(#[$about:meta])* Msr
     [each] $($(#[$each_about:meta])* $each:ident = $prefix:literal, $first:literal + $stride:literal * $count:ident;)*
     [single] $($(#[$single_about:meta])* $single:ident = $name:literal, $address:literal;)*) => {
        $(#[$about])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
        pub enum Msr {
            $($(#[$each_about])* $each(u8),)*
            $($(#[$single_about])* $single,)*
        }
        impl Msr {
            /// Returns the MSR at `address`, or `None` if no MSR of the PMU is there.
            pub const fn decode(address: u32) -> Option<Self> {
                // As long as any PMU's blocks are: a counter that this guest lacks is #GP, and no MSR of the VMM's.
                $(if let Some(n) = $crate::x86::msr::index(address, $first, $stride, $count) {
                    return Some(Self::$each(n));
                })*
                match address {
                    $($address => Some(Self::$single),)*
                    _ => None,
                }
            }

            /// Returns the MSR's address. A number that no MSR has gives an address near those that exist.
            pub const fn address(self) -> u32 {
                match self {
                    // Not checked: the number may be of a counter that no PMU has.
                    $(Self::$each(n) => $first + $stride * n as u32,)*
                    $(Self::$single => $address,)*
                }
            }

            /// Returns every MSR that can belong to a PMU: what an integration has to intercept.
            pub fn all() -> impl Iterator<Item = Self> {
                let single = [$(Self::$single),*].into_iter();
                single$(.chain((0..$count).map(Self::$each)))*
            }
        }
        /// The manual's name.
        impl core::fmt::Display for Msr {
            fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
                match self {
                    $(Self::$each(n) => write!(f, concat!($prefix, "{}"), n),)*
                    $(Self::$single => f.write_str($name),)*
                }
            }
        }
    };
}
pub(super) use msrs;

/// Returns which of `count` MSRs is at `address`, where the first is at `first` and each `stride` behind the one before.
pub(super) const fn index(address: u32, first: u32, stride: u32, count: u8) -> Option<u8> {
    // An address below the block must not wrap into it.
    match address.checked_sub(first) {
        Some(offset) if offset.is_multiple_of(stride) && offset / stride < count as u32 => {
            Some((offset / stride) as u8)
        }
        _ => None,
    }
}
