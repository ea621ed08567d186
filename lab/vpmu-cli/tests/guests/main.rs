//! The command and real guests: what must hold on any machine, however busy.
//!
//! Needs QEMU, the guest-side programs and vpmu-vmm, all of which `script/setup` prepares, and the network the first
//! time. Time is counted in instructions, so that limits are exact, except where this machine's own KVM runs the
//! guests. `skipped: <reason>` on standard error names what was missing. With `VPMU_TEST_ALL` set, the test fails
//! instead.
//!
//! One program holds all these tests, so that they share this machine's processors ([`support::turn`])
//! and are linked once.

mod aarch64;
mod amd_x86_64;
mod deadline;
mod disk_i386;
mod disk_x86_64;
mod exec_x86_64;
mod fleet_x86_64;
mod freeze_x86_64;
mod host_profile;
mod hypervisor_aarch64;
mod lbr_x86_64;
mod machines;
mod papi_x86_64;
mod paravirt;
mod payload;
mod payload_aarch64;
mod payload_x86_64;
mod pebs_x86_64;
mod perf_list_x86_64;
mod perfmon_x86_64;
mod rdpmc_module;
mod rdpmc_x86_64;
mod rings_x86_64;
mod save_x86_64;
mod selftest;
mod smp_x86_64;
mod stream_x86_64;
mod support;
mod their_vmm;
mod two_guests;
mod two_vcpus;
mod x86_64;
