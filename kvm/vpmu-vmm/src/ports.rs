//! The machine's ports: a serial line, power management, the doorbell of measurements.

use std::io::{self, Write};

use serde::{Deserialize, Serialize};
use vm_superio::serial::{NoEvents, SerialState};
use vm_superio::{Serial, Trigger};
use vmm_sys_util::eventfd::EventFd;
use vpmu_measure::{BEGIN, DOORBELL, DOORBELL_ID, END, SAVE};

use super::acpi::{PM1_CONTROL, PM1_EVENT, RESET, RESET_VALUE, S5};
use super::{Ending, Error};

pub(super) const COM1: u16 = 0x3f8;
pub(super) const COM1_IRQ: u32 = 4;
/// The second half of the event block, which selects the wanted events.
const PM1_ENABLE: u16 = PM1_EVENT + 2;
/// The keyboard controller's command port: 0xfe pulses the reset line.
const KEYBOARD: u16 = 0x64;

/// The services of the doorbell.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Offers {
    /// Whether it measures. Each measurement reads the host's statistics, so a guest that may begin measurements can
    /// keep the host reading.
    pub(super) measure: bool,
    /// Whether it saves the machine.
    pub(super) save: bool,
}

/// A request of a port access to the machine.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Request {
    End(Ending),
    BeginMeasuring,
    EndMeasuring,
}

/// Raises the serial line's interrupt.
struct Interrupt(EventFd);

impl Trigger for Interrupt {
    type E = io::Error;
    fn trigger(&self) -> io::Result<()> {
        self.0.write(1)
    }
}

/// The ports.
pub(super) struct Ports<W: Write> {
    serial: Serial<Interrupt, NoEvents, W>,
    offers: Offers,
    /// PM1 event enable. The events that it enables never happen.
    pm1_enable: u16,
}

/// The ports' state as a value.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct PortsState {
    #[serde(with = "SerialRegisters")]
    serial: SerialState,
    pm1_enable: u16,
}

/// vm-superio's state, field by field.
#[derive(Serialize, Deserialize)]
#[serde(remote = "SerialState")]
struct SerialRegisters {
    baud_divisor_low: u8,
    baud_divisor_high: u8,
    interrupt_enable: u8,
    interrupt_identification: u8,
    line_control: u8,
    line_status: u8,
    modem_control: u8,
    modem_status: u8,
    scratch: u8,
    in_buffer: Vec<u8>,
}

impl<W: Write> Ports<W> {
    /// Begins with `state`. An interrupt that is asserted is raised, so the interrupt controllers must have their state by
    /// then.
    pub(super) fn new(
        state: &PortsState,
        interrupt: EventFd,
        console: W,
        offers: Offers,
    ) -> Result<Self, Error> {
        let interrupt = Interrupt(interrupt);
        let serial = Serial::from_state(&state.serial, interrupt, NoEvents, console);
        Ok(Self {
            serial: serial.map_err(|error| Error::Stopped(format!("serial line: {error}")))?,
            offers,
            pm1_enable: state.pm1_enable,
        })
    }

    pub(super) fn state(&self) -> PortsState {
        PortsState {
            serial: self.serial.state(),
            pm1_enable: self.pm1_enable,
        }
    }

    /// Returns what raises the serial line's interrupt.
    pub(super) fn interrupt(&self) -> &EventFd {
        &self.serial.interrupt_evt().0
    }

    /// Gives bytes to the guest's serial line, and returns how many fit.
    pub(super) fn receive(&mut self, bytes: &[u8]) -> usize {
        self.serial.enqueue_raw_bytes(bytes).unwrap_or(0)
    }

    pub(super) fn console(&mut self) -> &mut W {
        self.serial.writer_mut()
    }

    pub(super) fn read(&mut self, port: u16, data: &mut [u8]) {
        // The bus floats where there is no device.
        data.fill(0xff);
        match (port, data) {
            (COM1..=0x3ff, [byte]) => *byte = self.serial.read((port - COM1) as u8),
            (DOORBELL, [byte]) => *byte = DOORBELL_ID,
            (PM1_ENABLE, [low, high]) => [*low, *high] = self.pm1_enable.to_le_bytes(),
            (PM1_EVENT..PM1_CONTROL, data) => data.fill(0),
            (PM1_CONTROL, data) => {
                // SCI_EN: firmware has enabled ACPI.
                data.fill(0);
                data[0] = 1;
            }
            (RESET, data) => data.fill(0),
            _ => {}
        }
    }

    pub(super) fn write(&mut self, port: u16, data: &[u8]) -> Option<Request> {
        match (port, data) {
            (COM1..=0x3ff, &[byte]) => {
                // A console that has gone is no reason to stop the guest.
                let _ = self.serial.write((port - COM1) as u8, byte);
                None
            }
            (PM1_ENABLE, &[low, high]) => {
                self.pm1_enable = u16::from_le_bytes([low, high]);
                None
            }
            (DOORBELL, [BEGIN]) if self.offers.measure => Some(Request::BeginMeasuring),
            (DOORBELL, [END]) if self.offers.measure => Some(Request::EndMeasuring),
            (DOORBELL, [SAVE]) if self.offers.save => Some(Request::End(Ending::Saved)),
            (PM1_CONTROL, &[low, high]) => {
                let value = u16::from_le_bytes([low, high]);
                let sleep = value >> 13 & 1 != 0;
                let kind = (value >> 10 & 7) as u8;
                (sleep && kind == S5).then_some(Request::End(Ending::PowerOff))
            }
            (RESET, &[value]) if value & RESET_VALUE == RESET_VALUE => {
                Some(Request::End(Ending::Reset))
            }
            (KEYBOARD, [0xfe]) => Some(Request::End(Ending::Reset)),
            _ => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(state: &PortsState, offers: Offers) -> Ports<Vec<u8>> {
        Ports::new(state, EventFd::new(0).unwrap(), Vec::new(), offers).unwrap()
    }

    fn ports() -> Ports<Vec<u8>> {
        of(&PortsState::default(), Offers::default())
    }

    #[test]
    fn the_guest_switches_off_as_acpi_says() {
        let mut ports = ports();
        let s5 = (1_u16 << 13 | u16::from(S5) << 10).to_le_bytes();
        assert_eq!(
            ports.write(PM1_CONTROL, &s5),
            Some(Request::End(Ending::PowerOff))
        );
        assert_eq!(ports.write(PM1_CONTROL, &[0, 0]), None);
        assert_eq!(ports.write(RESET, &[6]), Some(Request::End(Ending::Reset)));
    }

    #[test]
    fn any_access_of_any_width_is_answered() {
        let mut ports = ports();
        for port in 0..=u16::MAX {
            for width in [1, 2, 4] {
                let mut data = [0x55; 4];
                ports.read(port, &mut data[..width]);
                let _ = ports.write(port, &data[..width]);
            }
        }
        let mut byte = [0];
        ports.read(DOORBELL, &mut byte);
        assert_eq!(byte, [b'V']);
    }

    #[test]
    fn a_guest_that_rings_unasked_gets_nothing_for_it() {
        let rung = |measure, save| {
            let mut ports = of(&PortsState::default(), Offers { measure, save });
            [1, 2, 3].map(|what| ports.write(DOORBELL, &[what]))
        };
        let (begin, end) = (Some(Request::BeginMeasuring), Some(Request::EndMeasuring));
        assert_eq!(rung(false, false), [None; 3]);
        assert_eq!(rung(true, false), [begin, end, None]);
        assert_eq!(
            rung(false, true),
            [None, None, Some(Request::End(Ending::Saved))]
        );
    }

    #[test]
    fn the_ports_go_on_from_their_state() {
        let mut ports = ports();
        ports.write(COM1 + 7, &[0x5a]);
        ports.write(PM1_ENABLE, &[0x20, 0x01]);
        assert_eq!(ports.receive(b"typed"), 5);
        let bytes = postcard::to_stdvec(&ports.state()).unwrap();
        let state = postcard::from_bytes(&bytes).unwrap();
        let mut restored = of(&state, Offers::default());
        assert_eq!(restored.state(), ports.state());
        let mut byte = [0];
        restored.read(COM1, &mut byte);
        assert_eq!(byte, [b't']);
    }

    #[test]
    fn what_the_guest_writes_is_on_the_console() {
        let mut ports = ports();
        assert_eq!(ports.write(COM1, b"x"), None);
        assert_eq!(ports.console(), b"x");
    }
}
