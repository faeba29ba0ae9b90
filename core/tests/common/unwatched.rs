//! In place of [`monitor`](super::monitor) for tests inside the core: the rules know its types only
//! from outside. These tests judge by themselves.

use super::world::{Known, Passing, Side};
use crate::engine::Engine;
use crate::port::PortId;
use crate::time::Instant;
use crate::wire::ip::IpAddr16;
use nightporter_check::event::Event;
use nightporter_check::rule::Violation;
use nightporter_check::tap::Tap;

#[derive(Debug)]
pub struct Monitor;

impl Monitor {
    pub fn new() -> Self {
        Self
    }

    pub fn add(&self, _: Known) {}

    pub fn set_ends(&self, _: usize, _: [(IpAddr16, u16); 2]) {}

    pub fn set_lenient(&self, _: usize, _: bool) {}

    pub fn on_event(&mut self, _: Instant, _: Event) {}

    pub fn on_frame(&mut self, _: Passing<'_>) -> Result<(), Violation> {
        Ok(())
    }

    pub fn on_unseen(&mut self, _: u16, _: &[u8]) {}

    pub fn on_seen(&mut self, _: Instant, _: u16) {}

    pub fn on_settled(
        &mut self,
        _: Instant,
        _: &Engine<'_>,
        _: &[Option<PortId>],
    ) -> Result<(), Violation> {
        Ok(())
    }

    pub fn distrust(&mut self, _: &[u8], _: Tap, _: Side, _: bool) {}
}
