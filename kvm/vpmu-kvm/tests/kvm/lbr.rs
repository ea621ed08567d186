//! Tests of last branch records of a guest that runs.

use kvm_bindings::kvm_mp_state;
use kvm_ioctls::VcpuExit;
use vpmu_kvm::{
    AfterRun, Error, Exit, Lbr, Model, Options, Outcome, Pebs, Replays, Statistics, Vcpu,
};

use super::guest::{CODE, Code, END, MODEL, Machine};
use super::pebs::{BUFFER, WITH_PEBS, collecting};
use super::{
    CYCLES, GLOBAL_CTRL, NMI, PERFEVTSEL0, PMC0, Patience, Port, possible, run, try_attach,
};

const LBR_CTL: u32 = 0x14ce;
const LBR_DEPTH: u32 = 0x14cf;
const FROM: u32 = 0x1500;
const TO: u32 = 0x1600;
/// Enabled, in all rings, all kinds.
const ALL: u64 = 0x7f_0007;
const PERIOD: u64 = 2_000_000;

/// A loop whose every round goes another way than the one before: through a call, a conditional branch by the count, an
/// indirect jump by a register, and a call by way of memory. It ends when the host says so.
fn code() -> Code {
    recording().bytes(LOOP)
}

/// Begins to count, with records of all branches.
pub(crate) fn recording() -> Code {
    Code::default()
        .wrmsr(LBR_CTL, ALL)
        .wrmsr(PMC0, (1 << 48) - PERIOD)
        .wrmsr(PERFEVTSEL0, CYCLES)
        .wrmsr(GLOBAL_CTRL, 1)
}

/// The loop, by offsets in it.
const LOOP: &[u8] = &[
    0x31, 0xdb, // 0: xor ebx, ebx
    0xff, 0xc3, // 2: inc ebx
    0xf6, 0xc3, 0x03, // 4: test bl, 3
    0x75, 0x05, // 7: jne 14
    0xe8, 0x22, 0x00, 0x00, 0x00, // 9: call 48
    0x48, 0x8d, 0x05, 0x04, 0x00, 0x00, 0x00, // 14: lea rax, [rip + 4] (25)
    0xff, 0xe0, // 21: jmp rax
    0x0f, 0x0b, // 23: ud2
    0x53, // 25: push rbx
    0x80, 0x3c, 0x24, 0x80, // 26: cmp byte [rsp], 0x80
    0x5b, // 30: pop rbx
    0x72, 0x03, // 31: jb 36
    0x90, 0x90, 0x90, // 33: nop
    0xf7, 0xc3, 0xff, 0x1f, 0x00, 0x00, // 36: test ebx, 0x1fff
    0x75, 0xd6, // 42: jne 2
    0xe4, 0x10, // 44: in al, 0x10
    0xeb, 0x08, // 46: jmp 56
    0x90, // 48: nop
    0xc3, // 49: ret
    0x90, 0x90, 0x90, 0x90, 0x90, 0x90, // 50: nop
    0x84, 0xc0, // 56: test al, al
    0x74, 0xc6, // 58: je 2
];

/// Returns the branches of a round with this count, the last first, by offsets in the loop.
fn round(count: u32) -> Vec<(u64, u64)> {
    let mut branches = Vec::new();
    if count.is_multiple_of(4) {
        branches.extend([(9, 48), (49, 14)]);
    } else {
        branches.push((7, 14));
    }
    branches.push((21, 25));
    if count % 0x100 < 0x80 {
        branches.push((31, 36));
    }
    match count % 0x2000 {
        0 => branches.extend([(46, 56), (58, 2)]),
        _ => branches.push((42, 2)),
    }
    branches.reverse();
    branches
}

fn with_lbr() -> Options {
    Options {
        lbr: Lbr::On,
        ..Options::default()
    }
}

/// Attaches a PMU with last branch records, if this KVM can follow a guest.
pub(crate) fn attach(machine: &Machine) -> Option<Vcpu> {
    attach_model(machine, MODEL, &with_lbr())
}

fn attach_model(machine: &Machine, model: Model, options: &Options) -> Option<Vcpu> {
    let pmu = match try_attach(machine, model, options) {
        Err(Error::Lbr(reason)) => {
            eprintln!("skipped: {reason}");
            return None;
        }
        pmu => possible(pmu)?,
    };
    machine.set_cpuid(&pmu.offer());
    Some(pmu)
}

/// Returns the records, the last first, by offsets in the loop.
fn records(pmu: &mut Vcpu, base: u64) -> Vec<(u64, u64)> {
    let record = |n| {
        let (from, to) = (pmu.msr(FROM + n)?, pmu.msr(TO + n)?);
        (from != 0).then(|| (from.wrapping_sub(base), to.wrapping_sub(base)))
    };
    (0..32).map_while(record).collect()
}

/// Returns whether the branches are the last ones before some place of the loop. No branch is before any place.
fn are_of_the_loop(branches: &[(u64, u64)]) -> bool {
    // 0x2000 rounds have each way that there is, and the records are of less than 32 rounds.
    let rounds = 0x2000 + 32;
    let all: Vec<_> = (1..rounds).rev().flat_map(round).collect();
    (0..all.len()).any(|newest| all[newest..].starts_with(branches))
}

#[test]
fn records_are_the_branches_that_the_guest_has_taken() {
    let Some(machine) = Machine::new(code(), NMI) else {
        return;
    };
    let replays = check_records(machine);
    assert!(
        replays.is_none_or(|replays| {
            let overruns = replays.overruns;
            let none = Replays {
                overruns,
                ..Replays::default()
            };
            replays == none
        }),
        "no EFER.NXE"
    );
}

#[test]
fn records_are_the_branches_that_were_taken_for_the_guest() {
    let Some(machine) = Machine::new(code(), NMI) else {
        return;
    };
    allow_replays(&machine);
    let replays = check_records(machine);
    assert!(
        replays.is_none_or(|replays| replays.branches > 0),
        "{replays:?}"
    );
}

/// Sets EFER.NXE.
fn allow_replays(machine: &Machine) {
    let mut sregs = machine.vcpu.get_sregs().unwrap();
    sregs.efer |= 1 << 11;
    machine.vcpu.set_sregs(&sregs).unwrap();
}

/// Checks the records of some PMIs, and returns what was executed for the guest.
fn check_records(mut machine: Machine) -> Option<Replays> {
    /// The guest's PMIs are so many at least.
    const PMIS: u64 = 20;
    let base = CODE + code().0.len() as u64 - LOOP.len() as u64;
    let mut pmu = attach(&machine)?;
    let (patience, mut seen, mut full, mut whole) = (Patience::new(), 0, 0, 0);
    loop {
        patience.check();
        pmu.before_run().unwrap();
        let exit = machine.vcpu.run();
        let after = pmu.after_run().unwrap();
        let pmis = pmu.statistics().lock().unwrap().pmis;
        if pmis > seen {
            seen = pmis;
            let mut found = records(&mut pmu, base);
            let all = found.len();
            // On a busy host a period can be over as soon as the handler returns: IRET is then the oldest record.
            found.retain(|&(from, _)| from < LOOP.len() as u64);
            assert!(are_of_the_loop(&found), "{found:?}");
            full += u64::from(found.len() == 32);
            whole += u64::from(all == 32 || all > found.len());
            // The next PMI comes after another number of branches.
            let next = (1 << 48) - PERIOD - 1000 * pmis;
            assert_eq!(pmu.set_msr(PMC0, next), Outcome::Done);
            assert_eq!(pmu.set_msr(LBR_DEPTH, 32), Outcome::Done);
        }
        match (after, exit) {
            (AfterRun::Completed | AfterRun::Kicked, _) => {}
            (_, Ok(VcpuExit::IoIn(_, data))) => data[0] = u8::from(full >= PMIS),
            (_, Ok(VcpuExit::IoOut(port, _))) if port == u16::from(END) => break,
            (_, Ok(VcpuExit::IoOut(..))) => {}
            // Whoever stops a process and lets it go on interrupts KVM_RUN.
            (_, Err(error)) if error.errno() == libc::EINTR => {}
            (_, exit) => panic!("{exit:?}"),
        }
    }
    let statistics = pmu.statistics().lock().unwrap().clone();
    let (lbr, exits) = (statistics.lbr, statistics.exits.get(Exit::Follow));
    // A port ends a run, and one round in 8,192 has one. So does the bound of its time where the machine stands still.
    let ended = seen / 7 + 1 + statistics.replays.overruns;
    assert!(whole + ended >= seen, "{whole} of {seen}: {lbr:?}");
    assert!(exits <= 40 * seen, "{exits} exits for {seen} PMIs");
    Some(statistics.replays)
}

#[test]
fn a_guest_is_followed_from_thread_to_thread() {
    let Some(machine) = Machine::new(code(), NMI) else {
        return;
    };
    let Some(pmu) = attach(&machine) else {
        return;
    };
    let mut guest = (machine, pmu);
    for pmis in 1..=3 {
        // The thread before has ended, and with it the timer that bounds its runs.
        let one_pmi = move || {
            let (mut machine, mut pmu) = guest;
            let statistics = pmu.statistics();
            let follows = || statistics.lock().unwrap().exits.get(Exit::Follow);
            let before = follows();
            assert_eq!(pmu.set_msr(PMC0, (1 << 48) - PERIOD), Outcome::Done);
            run(&mut machine, &mut pmu, |port| {
                if let Port::In(data) = port {
                    data[0] = 0;
                }
                statistics.lock().unwrap().pmis >= pmis
            });
            assert!(follows() > before);
            (machine, pmu)
        };
        guest = std::thread::spawn(one_pmi).join().unwrap();
    }
}

#[test]
fn a_guest_that_waits_is_not_followed() {
    /// KVM_MP_STATE_HALTED.
    const HALTED: kvm_mp_state = kvm_mp_state { mp_state: 3 };
    let Some(mut machine) = Machine::new(code(), NMI) else {
        return;
    };
    allow_replays(&machine);
    let Some(mut pmu) = attach(&machine) else {
        return;
    };
    run(&mut machine, &mut pmu, |port| matches!(port, Port::In(_)));
    // KVM completes the access without entering the guest.
    pmu.before_run().unwrap();
    machine.vcpu.set_kvm_immediate_exit(1);
    assert!(machine.vcpu.run().is_err());
    assert_eq!(pmu.after_run().unwrap(), AfterRun::Vmm);
    machine.vcpu.set_kvm_immediate_exit(0);
    machine.vcpu.set_mp_state(HALTED).unwrap();
    let statistics = pmu.statistics();
    let of = |statistics: &Statistics| (statistics.pmis, statistics.replays.branches);
    let (patience, (pmis, branches)) = (Patience::new(), of(&statistics.lock().unwrap()));
    assert_eq!(pmu.set_msr(PMC0, (1 << 48) - 1), Outcome::Done);
    let now = loop {
        patience.check();
        pmu.before_run().unwrap();
        let now = of(&pmu.statistics().lock().unwrap());
        if now.0 > pmis {
            break now;
        }
    };
    // The PMI may be what ends the wait, and no branch comes before its handler's.
    assert_eq!(now, (pmis + 1, branches));
}

#[test]
fn without_records_nobody_is_followed() {
    let quiet = Code::default()
        .wrmsr(PMC0, (1 << 48) - PERIOD)
        .wrmsr(PERFEVTSEL0, CYCLES)
        .wrmsr(GLOBAL_CTRL, 1)
        .bytes(LOOP);
    let Some(mut machine) = Machine::new(quiet, NMI) else {
        return;
    };
    let Some(mut pmu) = attach(&machine) else {
        return;
    };
    let statistics = pmu.statistics();
    run(&mut machine, &mut pmu, |port| match port {
        Port::In(data) => {
            data[0] = u8::from(statistics.lock().unwrap().pmis > 0);
            false
        }
        Port::Out(port, _) => port == END,
    });
    let statistics = statistics.lock().unwrap();
    assert_eq!(statistics.exits.get(Exit::Follow), 0);
    assert_eq!(statistics.lbr, Default::default());
}

/// A PEBS record is of the moment when its branches were there, and they lead to it: the count of the loop's rounds is one
/// of its registers.
#[test]
fn the_branches_of_a_pebs_record_lead_to_it() {
    /// General registers and 32 branches, and the record's size: the buffer has room for four.
    const GROUPS: u64 = 31 << 24 | 0b1010;
    const SIZE: u64 = 32 + 144 + 32 * 24;
    const RECORDS: u64 = 4;
    for replays in [false, true] {
        let code = Code::default()
            .wrmsr(LBR_CTL, ALL)
            .record_groups(GROUPS, PERIOD)
            .bytes(LOOP);
        let base = CODE + code.0.len() as u64 - LOOP.len() as u64;
        let Some(mut machine) = Machine::new(code, NMI) else {
            return;
        };
        machine.describe_buffer(PERIOD);
        if replays {
            allow_replays(&machine);
        }
        let options = Options {
            lbr: Lbr::On,
            ..collecting(Pebs::Exit)
        };
        let Some(mut pmu) = attach_model(&machine, WITH_PEBS, &options) else {
            return;
        };
        let statistics = pmu.statistics();
        run(&mut machine, &mut pmu, |port| match port {
            Port::In(data) => {
                data[0] = u8::from(statistics.lock().unwrap().pebs.records >= RECORDS);
                false
            }
            Port::Out(port, _) => port == END,
        });
        let mut full = 0;
        for record in (0..RECORDS).map(|n| BUFFER + n * SIZE) {
            assert_eq!(machine.load(record), SIZE << 48 | GROUPS);
            let (rip, count) = (machine.load(record + 40), machine.load(record + 72));
            assert_eq!(machine.load(record + 8), rip);
            let branch = |n: u64| {
                let at = record + 32 + 144 + 24 * n;
                let (from, to) = (machine.load(at), machine.load(at + 8));
                (from != 0).then(|| (from.wrapping_sub(base), to.wrapping_sub(base)))
            };
            let found: Vec<_> = (0..32).map_while(branch).collect();
            // The last one may be any of this round's, or the one that has led to it.
            let rounds = count as u32 - 32..=count as u32;
            let all: Vec<_> = rounds.rev().flat_map(round).collect();
            let is_here = (0..7).any(|n| all[n..].starts_with(&found));
            assert!(is_here, "{found:?} in round {count:#x}");
            if let Some(&(_, to)) = found.first() {
                let straight = rip - base - to;
                assert!(straight < 24, "{straight} bytes from the last branch");
            }
            full += u64::from(found.len() == 32);
        }
        let statistics = statistics.lock().unwrap();
        // A port ends a run, and one round in 8,192 has one. So does the bound of its time.
        let ended = 1 + statistics.replays.overruns;
        assert!(full + ended >= RECORDS, "{full}: {:?}", statistics.lbr);
        assert_eq!(statistics.replays.branches > 0, replays);
    }
}
