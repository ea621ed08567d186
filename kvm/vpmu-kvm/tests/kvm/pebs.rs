//! Tests of records in the memory of a guest that runs.

use std::time::Duration;

use kvm_ioctls::VcpuFd;
use vm_memory::{Bytes, GuestAddress};

use super::guest::{Code, END, HANDLED, MODEL, Machine, REPORT};
use super::{GLOBAL_CTRL, GLOBAL_STATUS, NMI, PMC0, Port, attach, possible, run};
use vpmu_kvm::{
    Capability, Error, Model, Options, Pebs, Perfmon, Skid, State, Vcpu, detect, guests_only, intel,
};
use vpmu_perf::{Backing, PerfOptions, support};

const PERFEVTSEL0: u32 = 0x186;
pub(crate) const PEBS_ENABLE: u32 = 0x3f1;
const PEBS_DATA_CFG: u32 = 0x3f2;
const DS_AREA: u32 = 0x600;
/// Adaptive, EN, OS, USR, core cycles as Linux names them for PEBS.
const CYCLES: u64 = 0x4_10c3_00c0;

const AREA: u64 = 0x5000;
pub(crate) const BUFFER: u64 = 0x6000;
/// Size of a record with all groups.
const SIZE: u64 = 464;
const RECORDS: u64 = 3;
const PERIOD: u64 = 5_000_000;

impl Code {
    /// Asks for records of all groups, every `period` cycles.
    pub(crate) fn record(self, period: u64) -> Self {
        self.record_groups(7, period)
    }

    /// Asks for records of the basic group, every `period` cycles.
    pub(crate) fn record_places(self, period: u64) -> Self {
        self.record_groups(0, period)
    }

    /// Asks for records of these groups, every `period` cycles.
    pub(crate) fn record_groups(self, groups: u64, period: u64) -> Self {
        self.wrmsr(DS_AREA, AREA)
            .wrmsr(PEBS_DATA_CFG, groups)
            .wrmsr(PMC0, (1 << 48) - period)
            .wrmsr(PERFEVTSEL0, CYCLES)
            .wrmsr(PEBS_ENABLE, 1)
            .wrmsr(GLOBAL_CTRL, 1)
    }
}

impl Machine {
    pub(crate) fn load(&self, at: u64) -> u64 {
        self.memory.read_obj(GuestAddress(at)).unwrap()
    }

    /// Writes a DS save area whose buffer asks for an interrupt after a few records, and a counter's period.
    pub(crate) fn describe_buffer(&self, period: u64) {
        for (offset, value) in [
            (0x20, BUFFER),
            (0x28, BUFFER),
            (0x30, BUFFER + 0x1000),
            (0x38, BUFFER + RECORDS * SIZE),
            (0x40, 0_u64.wrapping_sub(period)),
        ] {
            let at = GuestAddress(AREA + offset);
            self.memory.write_obj(value, at).unwrap();
        }
    }
}

/// Returns this thread's, which counts its guest's, too.
pub(crate) fn time_on_cpu() -> Duration {
    let time = rustix::time::clock_gettime(rustix::time::ClockId::ThreadCPUTime);
    Duration::new(time.tv_sec as u64, time.tv_nsec as u32)
}

/// With the buffer, one exit has the kernel sample the guest, and the guest's next access makes records of the samples.
#[test]
fn a_ring_needs_no_exit_for_a_record() {
    const BASIC: u64 = 32;
    let code = Code::default()
        .record_places(PERIOD)
        .spin_until_told()
        .wrmsr(GLOBAL_CTRL, 0)
        .rdmsr(GLOBAL_STATUS);
    let Some(mut machine) = Machine::new(code, NMI) else {
        return;
    };
    machine.describe_buffer(PERIOD);
    let Some(mut pmu) = attach(&machine, WITH_PEBS, &collecting(Pebs::Buffer)) else {
        return;
    };
    let enough = time_on_cpu() + Duration::from_millis(60);
    run(&mut machine, &mut pmu, |port| match port {
        Port::In(data) => {
            data[0] = u8::from(time_on_cpu() >= enough);
            false
        }
        Port::Out(port, _) => port == END,
    });
    let pebs = pmu.statistics().lock().unwrap().pebs;
    // A KVM that is emulated does not tell perf that a guest is at work.
    assert!(pebs.sampled + pebs.outside > 0, "{pebs:?}");
    assert_eq!(pebs.records, 1 + pebs.sampled, "{pebs:?}");
    assert_eq!(machine.load(AREA + 0x28), BUFFER + pebs.records * BASIC);
    let mut before = 0;
    for record in (0..pebs.records).map(|n| BUFFER + n * BASIC) {
        assert_eq!(machine.load(record), BASIC << 48);
        let ip = machine.load(record + 8);
        assert!((0x8000..0x9000).contains(&ip), "{ip:#x}");
        let tsc = machine.load(record + 0x18);
        assert!(tsc > before, "in order: {tsc} after {before}");
        before = tsc;
    }
}

/// The value that R12 and XMM5 hold.
const KNOWN: u64 = 0x1234_5678_9abc_def0;

fn know_registers(vcpu: &VcpuFd) {
    let mut regs = vcpu.get_regs().unwrap();
    regs.r12 = KNOWN;
    vcpu.set_regs(&regs).unwrap();
    // A kernel switches on SSE, so the test does.
    let mut sregs = vcpu.get_sregs().unwrap();
    sregs.cr4 |= 1 << 9;
    vcpu.set_sregs(&sregs).unwrap();
}

/// Intel's PMU with PEBS.
pub(crate) const WITH_PEBS: Model = Model::Intel {
    version: Perfmon::V5,
    pebs: true,
};

pub(crate) fn collecting(pebs: Pebs) -> Options {
    Options {
        pebs,
        // These tests ask what a record has, and not where a machine's own counters put it.
        skid: Skid::Accepted,
        ..Options::default()
    }
}

#[test]
fn a_guest_finds_its_records_and_one_interrupt() {
    // movups xmm5, [rsp]
    let code = Code::default()
        .bytes(&[0x0f, 0x10, 0x2c, 0x24])
        .record(PERIOD)
        .spin_until_told()
        .wrmsr(GLOBAL_CTRL, 0)
        .rdmsr(GLOBAL_STATUS);
    let Some(mut machine) = Machine::new(code, NMI) else {
        return;
    };
    machine.describe_buffer(PERIOD);
    know_registers(&machine.vcpu);
    let stack = machine.vcpu.get_regs().unwrap().rsp;
    let above = GuestAddress(stack);
    machine.memory.write_obj(KNOWN, above).unwrap();
    let Some(mut pmu) = attach(&machine, WITH_PEBS, &collecting(Pebs::Exit)) else {
        return;
    };
    let mut handled = Vec::new();
    run(&mut machine, &mut pmu, |port| match port {
        Port::In(data) => {
            data[0] = u8::from(!handled.is_empty());
            false
        }
        Port::Out(END, _) => true,
        Port::Out(HANDLED, vector) => {
            handled.push(vector);
            false
        }
        Port::Out(..) => false,
    });
    assert!(handled.contains(&2), "the threshold's NMI: {handled:?}");
    let records = pmu.statistics().lock().unwrap().pebs.records;
    assert!(records >= RECORDS, "{records}");
    assert_eq!(
        machine.load(AREA + 0x28),
        BUFFER + records * SIZE,
        "the index is behind the last of {records}"
    );
    let mut before = 0;
    for record in (0..RECORDS).map(|n| BUFFER + n * SIZE) {
        assert_eq!(machine.load(record), SIZE << 48 | 7);
        let (ip, rip) = (machine.load(record + 8), machine.load(record + 0x48));
        assert!((0x8000..0x9000).contains(&ip), "{ip:#x}");
        assert_eq!(ip, rip, "the group of general registers");
        assert_eq!(machine.load(record + 0x10), 1, "the counter");
        let tsc = machine.load(record + 0x18);
        assert!(tsc > before, "in order: {tsc} after {before}");
        before = tsc;
        let (r12, xmm5) = (machine.load(record + 0xb0), machine.load(record + 0x120));
        assert_eq!((r12, xmm5), (KNOWN, KNOWN));
    }
}

/// By then the memory may be another guest's.
#[test]
fn an_overflow_before_a_reset_or_a_restore_has_no_record_behind_it() {
    const SOON: u64 = 1_000_000;
    type Anew = fn(&mut Vcpu, &State);
    let anew: [Anew; 2] = [
        |pmu, _| pmu.reset(),
        |pmu, fresh| pmu.restore(fresh).unwrap(),
    ];
    for anew in anew {
        let code = Code::default().record_places(SOON).eax(1).out(REPORT);
        let Some(mut machine) = Machine::new(code, NMI) else {
            return;
        };
        machine.describe_buffer(SOON);
        let Some(mut pmu) = attach(&machine, WITH_PEBS, &collecting(Pebs::Exit)) else {
            return;
        };
        let fresh = pmu.save();
        run(&mut machine, &mut pmu, |port| {
            matches!(port, Port::Out(REPORT, _))
        });
        let enough = time_on_cpu() + Duration::from_millis(5);
        while time_on_cpu() < enough {}
        let index = machine.load(AREA + 0x28);
        anew(&mut pmu, &fresh);
        assert_eq!(machine.load(AREA + 0x28), index);
        pmu.before_run().unwrap();
        assert_eq!(machine.load(AREA + 0x28), index);
    }
}

#[test]
fn a_guest_has_pebs_where_it_is_offered_and_records_can_be_written() {
    let options = collecting(Pebs::Exit);
    let Some(offer) = possible(detect(MODEL, &options)) else {
        return;
    };
    let Some(Capability::Intel(capability)) = offer.capability() else {
        panic!("{offer:?}");
    };
    assert_eq!(capability.pebs, None);
    // Late records are offered to those alone who accept them.
    let refused = detect(WITH_PEBS, &Options::default()).err();
    let is_broken = guests_only().is_ok_and(|found| !found.holds());
    let backing = support(&PerfOptions::default()).unwrap().backing;
    let late = backing == Backing::Hardware && !is_broken;
    assert_eq!(refused, late.then_some(Error::PebsSkid));
    let offer = detect(WITH_PEBS, &options).unwrap();
    let Some(Capability::Intel(intel::Capability { pebs: Some(_), .. })) = offer.capability()
    else {
        panic!("{offer:?}");
    };
}
