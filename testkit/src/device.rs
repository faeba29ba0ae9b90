//! A wire with smoltcp at its end: frames in, frames out, and a clock.

use std::cell::Cell;
use std::collections::VecDeque;

use smoltcp::phy::{Checksum, Device, DeviceCapabilities, Medium, RxToken, TxToken};
use smoltcp::time::Instant;

/// Bytes of an Ethernet header.
const ETHERNET: usize = 14;

thread_local! {
    /// The timestamp clock of the machine at work, because smoltcp asks a plain function.
    static CLOCK_MS: Cell<u32> = const { Cell::new(0) };
}

/// The timestamp clock, for `set_tsval_generator`.
#[must_use]
pub fn clock_ms() -> u32 {
    CLOCK_MS.get()
}

/// Sets the timestamp clock of all ends on this thread.
pub fn set_clock_ms(ms: u32) {
    CLOCK_MS.set(ms);
}

/// smoltcp's device.
#[derive(Clone, Debug)]
pub struct Wire {
    /// Frames that it has yet to take.
    pub arrived: VecDeque<Vec<u8>>,
    /// Frames that it has made.
    pub sent: VecDeque<Vec<u8>>,
    mtu: u16,
    verifies_tcp: bool,
}

impl Wire {
    /// With IP packets of up to `mtu` bytes. Without `verifies_tcp` TCP checksums that come in are
    /// not looked at: a driver may have left them unfinished.
    #[must_use]
    pub const fn new(mtu: u16, verifies_tcp: bool) -> Self {
        Self { arrived: VecDeque::new(), sent: VecDeque::new(), mtu, verifies_tcp }
    }
}

/// A frame that smoltcp takes.
#[derive(Debug)]
pub struct Arrived(Vec<u8>);

/// Where a frame goes that smoltcp makes.
#[derive(Debug)]
pub struct Sent<'a>(&'a mut VecDeque<Vec<u8>>);

impl RxToken for Arrived {
    fn consume<R, F: FnOnce(&[u8]) -> R>(self, f: F) -> R {
        f(&self.0)
    }
}

impl TxToken for Sent<'_> {
    fn consume<R, F: FnOnce(&mut [u8]) -> R>(self, len: usize, f: F) -> R {
        let mut frame = vec![0; len];
        let result = f(&mut frame);
        self.0.push_back(frame);
        result
    }
}

impl Device for Wire {
    type RxToken<'a> = Arrived;
    type TxToken<'a> = Sent<'a>;

    fn receive(&mut self, _now: Instant) -> Option<(Arrived, Sent<'_>)> {
        Some((Arrived(self.arrived.pop_front()?), Sent(&mut self.sent)))
    }

    fn transmit(&mut self, _now: Instant) -> Option<Sent<'_>> {
        Some(Sent(&mut self.sent))
    }

    fn capabilities(&self) -> DeviceCapabilities {
        let mut capabilities = DeviceCapabilities::default();
        capabilities.medium = Medium::Ethernet;
        capabilities.max_transmission_unit = usize::from(self.mtu) + ETHERNET;
        if !self.verifies_tcp {
            capabilities.checksum.tcp = Checksum::Tx;
        }
        capabilities
    }
}
