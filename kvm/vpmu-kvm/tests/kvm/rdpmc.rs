//! RDPMC of a guest's kernel that nobody has rewritten.

use std::sync::Arc;

use vm_memory::{Bytes, GuestAddress};
use vpmu_kvm::{Options, Rdpmc};

use super::guest::{CODE, Code, END, GP_HANDLER, HANDLED, MODEL, Machine, REPORT};
use super::{GLOBAL_CTRL, NMI, PMC0, Port};

const VALUE: u32 = 0x1234_5678;
const RDPMC: [u8; 2] = [0x0f, 0x33];

impl Code {
    /// Adds RDPMC of counter 0 as it is, under a single step, of whose end the handler of #DB reports the address.
    pub(crate) fn stepped_rdpmc(self) -> Self {
        // pushfq; or dword [rsp], 0x100; popfq
        let code = self.ecx(0);
        let code = code.bytes(&[0x9c, 0x81, 0x0c, 0x24, 0, 1, 0, 0, 0x9d]);
        code.bytes(&RDPMC).out(REPORT)
    }
}

/// Runs `code`, and returns its reports. `None`: this machine cannot.
fn reports(code: Code, rdpmc: &Arc<Rdpmc>) -> Option<(Machine, Vec<(u8, u32)>)> {
    let mut machine = Machine::new(code, NMI)?;
    let mut pmu = super::attach(&machine, MODEL, &Options::default())?;
    pmu.set_rdpmc(Arc::clone(rdpmc));
    let mut reports = Vec::new();
    super::run(&mut machine, &mut pmu, |port| match port {
        Port::Out(END, _) => true,
        Port::Out(port, value) => {
            reports.push((port, value));
            false
        }
        Port::In(_) => false,
    });
    Some((machine, reports))
}

fn two_bytes(machine: &Machine, at: u64) -> [u8; 2] {
    machine.memory.read_obj(GuestAddress(at)).unwrap()
}

/// Checks the instruction twice: where it faults, and where it has become RDMSR.
#[test]
fn a_single_step_ends_behind_the_instruction() {
    let begin = Code::default()
        .wrmsr(GLOBAL_CTRL, 0)
        .wrmsr(PMC0, VALUE.into());
    // mov ebx, 2; the instruction; dec ebx; jnz
    let begin = begin.bytes(&[0xbb, 2, 0, 0, 0]);
    let site = CODE + begin.0.len() as u64 + 5 + 9;
    let code = begin.stepped_rdpmc().bytes(&[0xff, 0xcb, 0x75, 0xea]);
    let rdpmc = Arc::new(Rdpmc::new());
    let Some((machine, reports)) = reports(code, &rdpmc) else {
        return;
    };
    let once = [(REPORT, site as u32 + 2), (REPORT, VALUE)];
    assert_eq!(reports, [once, once].concat());

    assert_eq!(two_bytes(&machine, site), [0x0f, 0x32]);
    assert_eq!(two_bytes(&machine, GP_HANDLER), [0xe6, 0xe7]);
    rdpmc.disarm(&machine.vcpu, &machine.memory).unwrap();
    assert_eq!(two_bytes(&machine, site), RDPMC);
    assert_eq!(two_bytes(&machine, GP_HANDLER), [0x0f, 0x1f]);
}

/// Checks that MSRs at the indices of RDPMC are KVM's: it has 0 and 1 (P5_MC_ADDR, P5_MC_TYPE), and no Hyper-V here.
#[test]
fn all_else_is_as_before() {
    let code = Code::default().wrmsr(PMC0, VALUE.into()).rdmsr(0);
    let code = [2, 0x4000_0000].into_iter().fold(code, Code::rdmsr);
    let code = code.ecx(9).bytes(&RDPMC).out(REPORT);
    let Some((_, reports)) = reports(code, &Arc::default()) else {
        return;
    };
    let faults = reports.iter().filter(|report| **report == (HANDLED, 13));
    assert_eq!(
        (reports[0], faults.count()),
        ((REPORT, 0), 3),
        "{reports:x?}"
    );
}
