//! The second guest's place, and what is put there.

use alloc::vec::Vec;
use core::{ffi::CStr, ops::Range};

use vpmu_monitor::{
    boot::{
        console::{self, Spare},
        device_tree::Machine,
        guest_image::ImageError,
        second,
    },
    world::{distributor, second::spi::KeptSpi},
};

use super::super::{
    boot::{part, place},
    error::BootError,
    mmu::{self, copy},
};

unsafe extern "C" {
    /// Distance of the second guest's file from the head, and its length; 0 where there is none. The same of its
    /// initrd. Bytes of its memory; 0: [`second::MEMORY`].
    static second_file: [u64; 5];
    /// Its command line.
    static second_words: [u8; 0x600];
}

/// What the second guest is, found at boot.
pub(crate) struct Second {
    pub(crate) entry: u64,
    pub(crate) tree: u64,
    pub(crate) vttbr: u64,
    pub(crate) alarm_intid: u32,
}

/// The second guest, before it is put anywhere.
pub(crate) struct Plan {
    file: Range<u64>,
    initrd: Option<Range<u64>>,
    /// Its memory.
    pub(crate) memory: Range<u64>,
    /// Its serial port.
    pub(crate) serial: Spare,
    /// That port's, which the first guest does not have.
    pub(crate) serial_interrupt: Option<KeptSpi>,
}

/// What is to become the second guest, where the boot file at `loaded` has one. `taken` is what its memory must leave
/// alone.
pub(crate) fn plan(
    tree: &[u8],
    ram: &Range<u64>,
    loaded: u64,
    taken: &[Range<u64>],
) -> Result<Option<Plan>, BootError> {
    // SAFETY: words of the monitor's own image, which the lab fills in.
    let [file, length, initrd, initrd_length, size] =
        unsafe { (&raw const second_file).read_volatile() };
    let file = part(ram, loaded, file, length)?;
    if file.is_empty() {
        return Ok(None);
    }
    let initrd = part(ram, loaded, initrd, initrd_length)?;
    let initrd = Some(initrd).filter(|initrd| !initrd.is_empty());
    let mut taken = taken.to_vec();
    taken.push(file.clone());
    taken.extend(initrd.clone());
    let size = if size == 0 { second::MEMORY } else { size };
    let serial = console::spare(tree).ok_or(BootError::NoSerialPort)?;
    let kept = |intid| KeptSpi::new(intid).ok_or(BootError::SerialInterrupt(intid));
    Ok(Some(Plan {
        memory: second::choose(ram, size, &taken).ok_or(BootError::NoSecondHome(size))?,
        serial_interrupt: serial.intid.map(kept).transpose()?,
        serial,
        file,
        initrd,
    }))
}

impl Plan {
    /// Everything in RAM that the first guest's parts must leave alone until they are copied.
    pub(crate) fn ranges(&self) -> impl Iterator<Item = Range<u64>> {
        [self.file.clone(), self.memory.clone()]
            .into_iter()
            .chain(self.initrd.clone())
    }

    /// What the first guest does not reach because of it, or only through the monitor.
    pub(crate) fn holes(&self, machine: &Machine) -> Vec<Range<u64>> {
        let distributor = machine.distributor.start;
        let serial = self.serial.base & !0xfff;
        let spi = self.serial_interrupt.map(KeptSpi::route_page);
        spi.into_iter()
            .chain([distributor::EXTENDED_PRIORITIES_PAGE])
            .map(|page| distributor + page.start..distributor + page.end)
            .chain([self.memory.clone(), serial..serial + 0x1000])
            .collect()
    }

    /// Copies the guest into its memory, with its device tree and stage 2. `affinity` is its CPU's.
    pub(crate) fn put(
        &self,
        tree: &[u8],
        machine: &Machine,
        affinity: u64,
    ) -> Result<Second, BootError> {
        let memory = &self.memory;
        let tree_at = second::tree_at(memory);
        let initrd = self.initrd.as_ref().map(|file| {
            let length = file.end - file.start;
            second::initrd_at(memory, length).ok_or(ImageError::TooLarge(length))
        });
        let initrd = initrd.transpose()?;
        let end = initrd.as_ref().map_or(tree_at, |initrd| initrd.start);
        let room = memory.start..end;
        let entry = place(&self.file, second::loaded_at(memory), &room)?.start;
        copy(self.file.start, entry, self.file.end - self.file.start);
        if let Some((from, to)) = self.initrd.as_ref().zip(initrd.as_ref()) {
            copy(from.start, to.start, to.end - to.start);
        }
        // SAFETY: part of the monitor's image.
        let words = unsafe { &second_words };
        let words = CStr::from_bytes_until_nul(words).unwrap_or_default();
        let words = words.to_str().unwrap_or_default();
        let guest = second::Guest {
            memory,
            serial: self.serial.base,
            cpu: affinity,
            initrd: initrd.as_ref(),
            words,
        };
        let tree = second::tree(tree, machine, &guest)?;
        copy(tree.as_ptr() as u64, tree_at, tree.len() as u64);
        Ok(Second {
            entry,
            tree: tree_at,
            vttbr: mmu::build_second(memory, self.serial.base)?,
            alarm_intid: *machine.timer_intids.get(3).ok_or(BootError::NoAlarm)?,
        })
    }
}
