//! Two guests on one CPU: whose turn it is, and the interrupt controller that the second guest sees.
//!
//! The first guest is the machine's, as when it is alone. The second has memory, a CPU's time, a timer, a PMU and a serial
//! port. The CPU that booted is shared between them; on the others the first guest is alone.

pub mod gic;
pub mod registers;
pub mod scheduler;
pub mod spi;
pub mod statistics;

mod frames;
