//! What a stream hears by itself, without guests and without a core: for the fuzzer, which says
//! what no host should.

use std::io::{self, IoSliceMut};
use std::net::{IpAddr, Ipv4Addr};
use std::os::fd::OwnedFd;

use nightporter_core::time::Instant;
use nightporter_core::toe::id::HostId;
use rustix::io::readv;

use super::Fabric;
use super::heard::Heard;
use super::stream::{INTRODUCTION_MAX, Stream};
use crate::toe::trust::SECRET_LEN;

const HERE: IpAddr = IpAddr::V4(Ipv4Addr::new(192, 0, 2, 1));

/// Another host's stream, to read.
#[derive(Debug)]
pub struct StreamReader(Stream);

impl StreamReader {
    /// Bytes that are in memory for what is read, beside the reader itself, at most.
    pub const BYTES_MAX: usize = INTRODUCTION_MAX;

    /// Of the stream that this socket is, which does not block. `opener`: this host has connected,
    /// and not the other one.
    #[must_use]
    pub fn new(socket: OwnedFd, opener: bool) -> Self {
        let (now, host) = (Instant::from_secs(1000), (HostId(1), HERE));
        if !opener {
            return Self(Stream::from(now, host, socket));
        }
        let mut stream = Stream::to(now, host.0, host.1);
        stream.set_pipe(socket);
        Self(stream)
    }

    /// What it has next.
    pub fn poll(&mut self) -> Heard {
        self.0.poll()
    }

    /// What the other host has shown is right: after [`Heard::Shown`], and once.
    pub fn prove(&mut self) {
        self.0.prove(&[0; SECRET_LEN]);
    }

    /// Whether the other host has said where its worker is, which is forgotten: after
    /// [`Heard::Introduced`].
    pub fn take_introduction(&mut self) -> bool {
        self.0.take_introduction().is_some()
    }

    /// The next payload, `room` bytes at most, which are not 0: after [`Heard::Payload`].
    ///
    /// # Errors
    /// WouldBlock: there is none now. UnexpectedEof and others: the end.
    pub fn receive(&mut self, room: usize) -> io::Result<Vec<u8>> {
        let mut payload = vec![0; room];
        let len = self.0.receive_by(room, |socket, len, behind| {
            let mut places = [IoSliceMut::new(&mut payload[..len]), IoSliceMut::new(behind)];
            Ok(readv(socket, &mut places)?)
        })?;
        payload.truncate(len);
        Ok(payload)
    }

    /// Bytes that are in memory now for what is read: see [`Self::BYTES_MAX`].
    #[must_use]
    pub const fn kept_bytes(&self) -> usize {
        self.0.said_len()
    }
}
