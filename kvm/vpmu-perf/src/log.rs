//! The log of an event's overflows, which the kernel writes into memory.
//!
//! A signal says that there was an overflow, and not how many there were. And only the log says that the kernel has
//! throttled the event: it stops until the next tick or the next period that it is given (perf_event_overflow).

use std::io;

use crate::buffer::{Overflows, RingBuffer};
use crate::event::PerfEvent;
use crate::kernel::Kernel;

/// The log of one event.
#[derive(Debug)]
pub(crate) struct OverflowLog {
    buffer: RingBuffer,
    /// What has been read and nobody has taken.
    read: Overflows,
    /// Whether the event has ever been throttled.
    throttled: bool,
}

impl OverflowLog {
    pub(crate) fn open(kernel: &'static dyn Kernel, event: &PerfEvent) -> io::Result<Self> {
        Ok(Self {
            buffer: RingBuffer::map(kernel, event.fd(), RingBuffer::size_for(0))?,
            read: Overflows::default(),
            throttled: false,
        })
    }

    /// Returns whether the event has ever been throttled.
    pub(crate) fn has_throttled(&mut self) -> bool {
        self.read();
        self.throttled
    }

    /// Takes the overflows since the last time.
    pub(crate) fn take(&mut self) -> Overflows {
        self.read();
        std::mem::take(&mut self.read)
    }

    fn read(&mut self) {
        self.buffer.take_overflows(&mut self.read);
        self.throttled |= self.read.throttled;
    }
}
