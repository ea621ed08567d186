//! Kernels with page tables of other kinds: five levels, those of a process (KPTI), and modules.

use super::*;

/// A module's text: mapped page by page, far from the kernel's and next to memory of others.
const MODULE: u64 = 0xffff_ffff_c040_0000;
const MODULE_AT: u64 = 0xc_0000;
const ANOTHERS_AT: u64 = 0xc_1000;

#[test]
fn five_levels_are_as_good_as_four() {
    for levels in [4, 5] {
        let mut guest = Guest::with_tables(levels, &[&ENDBR64, &CLAC]);
        let rdpmc = Rdpmc::new();
        assert_eq!(guest.arm(&rdpmc), Ok(()), "{levels}");
        guest.push(KERNEL_FRAME);
        let frame = guest.frame(STACK).unwrap();
        rdpmc.rewrite(frame.rip, guest.code());
        assert!(rdpmc.is_site(TEXT + SITE));
        // Canonical with five levels alone.
        let high = 0xff11_0000_0000_0000;
        guest.map(high, USER_AT, P);
        let mut frame = KERNEL_FRAME;
        frame[1] = high;
        guest.push(frame);
        assert_eq!(guest.frame(STACK).is_some(), levels == 5);
    }
}

/// With KPTI the handler begins on the tables of the interrupted process, which have little of the kernel; and the
/// kernel's own tables let nobody execute the process's pages.
#[test]
fn a_process_with_tables_of_its_own_reads_counters() {
    let mut guest = Guest::linux();
    guest.sregs.cr4 |= PCE;
    guest.map(USER, USER_AT, P | U | NX);
    guest.map(MODULE, MODULE_AT, P);
    guest.write(MODULE_AT, &frame::RDPMC);
    let (before, rdpmc) = (guest.all(), Rdpmc::new());
    assert_eq!(guest.arm(&rdpmc), Ok(()));
    rdpmc.rewrite(MODULE, guest.code());

    let kernels = guest.new_tables();
    guest.map(TEXT, TEXT_AT, P);
    guest.map(IDT, IDT_AT, P | NX);
    guest.map(STACK, STACK_AT, P | W | NX);
    guest.map(USER, USER_AT, P | U);
    guest.push(USER_FRAME);
    let entry = rdpmc.entry(TEXT + HANDLER + 4).unwrap();
    assert!(entry.can_return(guest.code()));
    let frame = guest.frame(STACK).unwrap();
    assert_eq!((frame.rip, frame.ring), (USER, Ring::User));
    assert!(frame.step_over(STACK, guest.code()));
    // The module is the kernel's alone. All that was known stays known.
    assert!(rdpmc.is_site(MODULE));
    guest.sregs.cr3 = kernels;
    assert_eq!(guest.arm(&rdpmc), Ok(()));
    assert!(rdpmc.is_site(MODULE));
    rdpmc.remove(guest.code());
    assert_eq!(guest.all()[..0x1000], before[..0x1000]);
    assert_eq!(guest.bytes(MODULE_AT), frame::RDPMC);
    assert_eq!(guest.bytes(TEXT_AT + HANDLER + 4), CLAC);
}

#[test]
fn a_module_s_rdpmc_is_a_site_until_the_module_has_gone() {
    let mut guest = Guest::linux();
    let rdpmc = Rdpmc::new();
    guest.map(MODULE, MODULE_AT, P);
    guest.map(MODULE + 0x1000, ANOTHERS_AT, P);
    guest.write(MODULE_AT + 0x123, &frame::RDPMC);
    // One across two pages of the module, which are no neighbours in a guest that has run for long.
    guest.map(MODULE + 0x2000, MODULE_AT + 0x4000, P);
    guest.write(ANOTHERS_AT + 0xfff, &frame::RDPMC[..1]);
    guest.write(MODULE_AT + 0x4000, &frame::RDPMC[1..]);
    for at in [MODULE + 0x123, MODULE + 0x1fff] {
        let mut frame = KERNEL_FRAME;
        frame[1] = at;
        guest.push(frame);
        let frame = guest.frame(STACK).unwrap();
        assert_eq!((frame.rip, frame.ring), (at, Ring::Kernel));
        rdpmc.rewrite(frame.rip, guest.code());
        assert!(rdpmc.is_site(at));
    }
    assert_eq!(guest.bytes(MODULE_AT + 0x123), [0x0f, 0x32]);
    assert_eq!(guest.bytes(MODULE_AT + 0x4000), [0x32]);
    // rmmod: the address is nothing's. What lies in the memory now is somebody else's.
    guest.map(MODULE, 0, 0);
    let at = 0x800;
    guest.write(TEXT_AT + at, &CLAC);
    guest.gate(TEXT + at, 0x8e);
    assert_eq!(guest.arm(&rdpmc), Ok(()));
    assert!(!rdpmc.is_site(MODULE + 0x123));
    assert!(rdpmc.is_site(MODULE + 0x1fff));
    rdpmc.remove(guest.code());
    assert_eq!(guest.bytes(MODULE_AT + 0x123), [0x0f, 0x32]);
    assert_eq!(guest.bytes(MODULE_AT + 0x4000), [0x33]);
}

#[test]
fn memory_of_a_module_that_has_gone_unnoticed_stays_as_it_is() {
    let mut guest = Guest::linux();
    guest.map(MODULE, MODULE_AT, P);
    for (data, left) in [([0x0f, 0x32], [0x0f, 0x33]), (*b"12", *b"12")] {
        let rdpmc = Rdpmc::new();
        guest.write(MODULE_AT + 0x123, &frame::RDPMC);
        guest.map(MODULE, MODULE_AT, P);
        rdpmc.rewrite(MODULE + 0x123, guest.code());
        // A process's tables, which never had the module, look the same.
        guest.map(MODULE, 0, 0);
        guest.write(MODULE_AT + 0x123, &data);
        rdpmc.remove(guest.code());
        assert_eq!(guest.bytes(MODULE_AT + 0x123), left);
    }
}

#[test]
fn modules_that_come_and_go_leave_room_for_others() {
    let mut guest = Guest::linux();
    let rdpmc = Rdpmc::new();
    let load = |guest: &mut Guest, n: u64| {
        let at = MODULE + n * 0x1000;
        guest.write(MODULE_AT + n, &frame::RDPMC);
        guest.map(at, MODULE_AT, P);
        rdpmc.rewrite(at + n, guest.code());
        at
    };
    let most = MOST_SITES as u64;
    for n in 0..2 * most {
        let at = load(&mut guest, 2 * n);
        assert!(rdpmc.is_site(at + 2 * n), "{n}");
        guest.map(at, 0, 0);
    }
    // Those that stay take all of the room. Further ones fault each time.
    for n in 0..=most {
        let at = load(&mut guest, 2 * n);
        assert_eq!(rdpmc.is_site(at + 2 * n), n < most, "{n}");
    }
    assert_eq!(guest.bytes(MODULE_AT + 2 * most), frame::RDPMC);
    assert_eq!(rdpmc.places().sites.len(), MOST_SITES);
}

/// A kernel that traces itself has a breakpoint's byte for the first one of an instruction, and gives it back later.
#[test]
fn a_site_that_the_guest_traces_stays_a_site() {
    let guest = Guest::linux();
    let rdpmc = Rdpmc::new();
    rdpmc.rewrite(TEXT + SITE, guest.code());
    guest.write(TEXT_AT + SITE, &[0xcc]);
    assert_eq!(guest.arm(&rdpmc), Ok(()));
    assert!(rdpmc.is_site(TEXT + SITE));
    rdpmc.remove(guest.code());
    assert_eq!(guest.bytes(TEXT_AT + SITE), [0xcc, 0x33]);
}
