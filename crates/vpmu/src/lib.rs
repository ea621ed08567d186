//! An embeddable virtual PMU: what a guest sees when it programs performance counters, and the
//! policies that make it cheap. No operating system, no hypervisor, no allocation, no unsafe code.
#![no_std]
#![forbid(unsafe_code)]

pub mod arm;
pub mod counter;
