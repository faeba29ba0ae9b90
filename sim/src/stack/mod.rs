//! The common interface of the machines' TCPs.

pub mod address;
pub mod app;
mod emit;
mod hostile;
mod neighbor;
mod shell;
mod smoltcp;
mod strict;

use nightporter_core::time::Instant;

use self::shell::Shell;
pub use self::strict::MAYBE_NETWORK;
use crate::plan::{ConnPlan, Machine, Offloads, StackKind, StackPlan};
use crate::random::Random;
use nightporter_check::frame::Frame;

/// Number of a connection: its index in [`crate::plan::Plan::conns`].
pub type ConnId = usize;

/// A network stack with its applications. It sees frames and time, nothing else.
///
/// Drain order: after any call, `poll_transmit` until `None`, then `poll_timeout`.
pub trait Stack {
    /// A frame that the driver took from its ring, or the network card from the wire.
    fn handle_frame(&mut self, now: Instant, frame: Frame);

    /// Timers and applications run. Called whenever [`Self::poll_timeout`] is due *and* the machine
    /// has a processor; that may be much later.
    fn handle_timeout(&mut self, now: Instant);

    /// The next frame for the driver.
    fn poll_transmit(&mut self, now: Instant) -> Option<Frame>;

    /// When [`Self::handle_timeout`] has something to do; in the past means at once.
    fn poll_timeout(&mut self, now: Instant) -> Option<Instant>;

    /// This machine is one end of connection `id`: it listens, or opens at `plan.opens_at`.
    fn add_conn(&mut self, id: ConnId, plan: &ConnPlan);

    /// Applications stop reading, or go on.
    fn set_reading(&mut self, on: bool);

    /// It takes window back, or stops doing so; a stack that cannot ignores it.
    fn set_shrinking(&mut self, on: bool);

    /// The driver takes these unfinished, to send and to deliver; at first none. A stack that never
    /// makes them ignores it.
    fn set_offloads(&mut self, offloads: Offloads) {
        let _ = offloads;
    }

    /// How far this end of every connection has come, in the order of `add_conn`.
    fn ends(&self) -> Vec<EndReport>;

    /// How many of [`Self::ends`] are neither closed nor reset; cheap.
    ///
    /// The end of a server stays [`Outcome::Waiting`] if the client's SYN never comes: a connection
    /// is also over if one end is, and the other waits.
    fn ends_open(&self) -> usize;

    /// Received segments that no conforming peer would have sent (PAWS failures, ACKs of the
    /// future, data beyond its window, ...). Empty for stacks that do not report them.
    fn complaints(&self) -> Vec<Complaint> {
        Vec::new()
    }
}

/// The stack that `plan` asks for, without connections.
///
/// `mtu` is the largest IP packet in bytes. Its random choices follow from `seed` and `machine`;
/// after a reboot the seed must differ.
#[must_use]
pub fn build(plan: &StackPlan, machine: Machine, mtu: u16, seed: u64) -> Box<dyn Stack> {
    let seed = Random::new(seed, &format!("stack of {machine:?}")).bits();
    match plan.kind {
        StackKind::Strict => {
            Box::new(Shell::new(machine, strict::Strict::new(plan, machine, mtu, seed)))
        }
        StackKind::Smoltcp => {
            Box::new(Shell::new(machine, smoltcp::Smoltcp::new(plan, machine, mtu, seed)))
        }
        StackKind::Hostile => Box::new(hostile::Hostile::new(machine, mtu, seed)),
    }
}

/// An observation of an end that no conforming peer would have caused.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Complaint {
    /// In which connection.
    pub conn: ConnId,
    /// The observation.
    pub cause: &'static str,
    /// How often.
    pub count: u64,
}

/// One end of one connection.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct EndReport {
    /// Which connection.
    pub conn: ConnId,
    /// The machine with this end.
    pub machine: Machine,
    /// Application bytes handed to TCP so far, and in all.
    pub written: u64,
    /// See `written`.
    pub to_write: u64,
    /// Application bytes got from TCP so far; every one was compared with what it should be.
    pub read: u64,
    /// Offset of the first byte that was not the one written at that place (INV-01, INV-02).
    pub wrong_at: Option<u64>,
    /// When the SYN was sent (client) or first seen (server).
    pub opened_at: Option<Instant>,
    /// When its handshake was over: `connect` or `accept` returned.
    pub connected_at: Option<Instant>,
    /// When the last byte written was acknowledged.
    pub acked_at: Option<Instant>,
    /// When the other end's last byte was read.
    pub delivered_at: Option<Instant>,
    /// How it stands.
    pub outcome: Outcome,
    /// Since when it has been closed or reset.
    pub over_at: Option<Instant>,
}

/// How an end of a connection stands.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Outcome {
    /// Nothing happened yet.
    Waiting,
    /// Under way.
    Open,
    /// Both FINs are through, in this end's view, or all but the ACK of its own.
    Closed,
    /// It got an RST, or gave up and sent one.
    Reset,
}

#[cfg(test)]
mod tests;
