//! The TCP of the machines in the world: what they have in common.

use nightporter_core::time::Instant;

use crate::frame::Frame;
use crate::plan::{ConnPlan, Machine};

/// Number of a connection: its index in [`crate::plan::Plan::conns`].
pub type ConnId = usize;

/// Addresses of a machine; both ends derive them from the [`Machine`] alone.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Address {
    /// Ethernet.
    pub mac: [u8; 6],
    /// IPv4.
    pub v4: [u8; 4],
    /// IPv6.
    pub v6: [u8; 16],
}

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

    /// How far this end of every connection has come, in the order of `add_conn`.
    fn ends(&self) -> Vec<EndReport>;

    /// What it saw that no conforming peer would have sent (PAWS failures, ACKs of the future, data
    /// beyond its window, ...): cause and count. Empty for stacks that do not say.
    fn complaints(&self) -> Vec<(&'static str, u64)> {
        Vec::new()
    }
}

/// One end of one connection.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct EndReport {
    /// Which connection.
    pub conn: ConnId,
    /// Whose end.
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
    /// When the last byte written was acknowledged.
    pub acked_at: Option<Instant>,
    /// When the other end's last byte was read.
    pub delivered_at: Option<Instant>,
    /// How it stands.
    pub outcome: Outcome,
}

/// How an end of a connection stands.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Outcome {
    /// Nothing happened yet.
    Waiting,
    /// Under way.
    Open,
    /// Both FINs are through, in this end's view.
    Closed,
    /// It got an RST, or gave up and sent one.
    Reset,
}
