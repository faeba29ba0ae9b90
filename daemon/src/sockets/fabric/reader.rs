//! A stream that reads by itself, without guests and without a core: for the fuzzer, which says
//! what no host should.

use std::io::{self, ErrorKind, IoSliceMut};
use std::net::{IpAddr, Ipv4Addr, TcpStream};
use std::os::fd::OwnedFd;

use nightporter_core::time::Instant;
use nightporter_core::toe::id::HostId;
use rustix::io::readv;
use rustls::Connection;

use super::Fabric;
use super::arrival::Heard;
use super::pipe::{COST_MAX, COST_OF_A_READ_MAX, Pipe, SEALED_AT_ONCE};
use super::stream::{INTRODUCTION_MAX, Stream};
use crate::sockets::trust::Secured;

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

    /// Its next arrival.
    pub fn poll(&mut self) -> Heard {
        self.0.poll()
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

/// A stream that goes by TLS, below its messages.
#[derive(Debug)]
pub struct SealedReader(Pipe);

impl SealedReader {
    /// The cost of a turn at most, in bytes of plaintext: a read begins while it costs less.
    pub const COST_MAX: usize = COST_MAX + COST_OF_A_READ_MAX;
    /// Bytes that were taken to be sent and are not with the socket, at most.
    pub const HELD_MAX: usize = SEALED_AT_ONCE;

    /// Over a socket that does not block, behind the handshake.
    #[must_use]
    pub fn new(socket: TcpStream, mut tls: Box<Connection>) -> Self {
        tls.set_buffer_limit(Some(SEALED_AT_ONCE));
        Self(Pipe::from(Secured { socket, tls }))
    }

    /// Reading may cost as much as before, from now on.
    pub const fn begin_turn(&mut self) {
        self.0.begin_turn();
    }

    /// The next plaintext, `room` bytes at most, which are not 0.
    ///
    /// # Errors
    /// WouldBlock: there is none now. `Other`: nothing was taken, as `has_no_place` says. Others:
    /// the end.
    pub fn receive(&mut self, room: usize, has_no_place: bool) -> io::Result<Vec<u8>> {
        let Pipe::Sealed(sealed) = &mut self.0 else { return Err(ErrorKind::Unsupported.into()) };
        let mut plain = Vec::new();
        sealed.deliver(room, |at, bytes| {
            assert_eq!(at, plain.len());
            plain.extend(bytes);
            !has_no_place
        })?;
        Ok(plain)
    }

    /// Takes some of these bytes to send; how many.
    ///
    /// # Errors
    /// WouldBlock: none now. Others: the end.
    pub fn send(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0.write(bytes)
    }

    /// Bytes that were taken and are not with the socket: see [`Self::HELD_MAX`].
    #[must_use]
    pub const fn held(&self) -> usize {
        self.0.held()
    }

    /// Reading in this turn has cost so much: see [`Self::COST_MAX`].
    #[must_use]
    pub const fn cost(&self) -> usize {
        self.0.cost()
    }

    /// Whether there may be more to read of which no event tells. Once.
    pub fn take_more(&mut self) -> bool {
        self.0.take_more()
    }
}
