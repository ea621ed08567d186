//! PSCI (Arm DEN 0022) by the device tree's conduit.

use core::sync::atomic::{AtomicBool, Ordering::Relaxed};

use smccc::psci::{
    PSCI_AFFINITY_INFO_64, PSCI_CPU_OFF, PSCI_CPU_ON_64, PSCI_CPU_SUSPEND_64, PSCI_SYSTEM_OFF,
    PSCI_VERSION,
};

use crate::machine::Conduit;

static HVC: AtomicBool = AtomicBool::new(false);

/// Sets the instruction that calls the firmware.
pub(crate) fn set_conduit(conduit: Conduit) {
    HVC.store(conduit == Conduit::Hvc, Relaxed);
}

/// Calls function `function`, and returns PSCI's result, negative for errors.
pub(crate) fn call(function: u32, arguments: [u64; 3]) -> i64 {
    let mut all = [0; 17];
    all[..3].copy_from_slice(&arguments);
    let result = if HVC.load(Relaxed) {
        smccc::hvc64(function, all)
    } else {
        smccc::smc64(function, all)
    };
    result[0].cast_signed()
}

/// Calls function `function` of the hypervisor; there is one at EL2.
pub(crate) fn hypervisor_call(function: u32) -> u64 {
    smccc::hvc64(function, [0; 17])[0]
}

/// Returns the version: major in bits 31:16, minor below.
pub(crate) fn version() -> i64 {
    call(PSCI_VERSION, [0; 3])
}

/// Starts CPU `mpidr` at `entry` with x0 = `context`.
pub(crate) fn cpu_on(mpidr: u64, entry: u64, context: u64) -> i64 {
    call(PSCI_CPU_ON_64, [mpidr, entry, context])
}

/// Suspends this CPU in `power_state` until an interrupt is pending.
pub(crate) fn cpu_suspend(power_state: u64) -> i64 {
    call(PSCI_CPU_SUSPEND_64, [power_state, 0, 0])
}

/// Returns the CPU's state. 0: on, 1: off, 2: on its way.
pub(crate) fn affinity_info(mpidr: u64) -> i64 {
    call(PSCI_AFFINITY_INFO_64, [mpidr, 0, 0])
}

/// Stops this CPU.
pub(crate) fn cpu_off() -> ! {
    call(PSCI_CPU_OFF, [0; 3]);
    panic!("CPU_OFF returned");
}

/// Stops the machine.
pub(crate) fn system_off() -> ! {
    call(PSCI_SYSTEM_OFF, [0; 3]);
    #[expect(clippy::empty_loop, reason = "nothing is left to do or to say")]
    loop {}
}
