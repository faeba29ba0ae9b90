//! In place of UCX, in a daemon that is built without: there is no worker, so nothing asks one.

use std::os::fd::BorrowedFd;

use super::{EndId, Event, HEAD_LEN};

/// There is none.
#[derive(Debug)]
pub(crate) enum Worker {}

/// Nor this.
#[derive(Debug)]
pub(in super::super) enum Held {}

impl Held {
    pub(super) fn bytes(&self) -> &[u8] {
        match *self {}
    }
}

impl Worker {
    pub(crate) fn new() -> Result<Self, &'static str> {
        Err("this nightporterd is built without UCX")
    }

    pub(crate) fn fd(&self) -> BorrowedFd<'_> {
        match *self {}
    }

    pub(super) fn address(&self) -> &[u8] {
        match *self {}
    }

    pub(super) fn connect(&mut self, _: &[u8]) -> Result<EndId, &'static str> {
        match *self {}
    }

    pub(super) fn close(&mut self, _: EndId) {
        match *self {}
    }

    pub(super) fn send(
        &mut self,
        _: EndId,
        _: u64,
        _: [u8; HEAD_LEN],
        _: Vec<u8>,
    ) -> Result<bool, &'static str> {
        match *self {}
    }

    pub(super) fn progress(&mut self) -> bool {
        match *self {}
    }

    pub(super) fn arm(&mut self) -> bool {
        match *self {}
    }

    pub(super) fn poll_event(&mut self) -> Option<Event> {
        match *self {}
    }
}
