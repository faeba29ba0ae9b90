//! A connection over TLS that waits for nothing.

use std::io::{self, ErrorKind};
use std::net::TcpStream;
use std::os::fd::{AsFd, OwnedFd};

use rustix::event::{PollFd, PollFlags};
use rustls::Connection;
use rustls::pki_types::CertificateDer;

use super::Secured;
use crate::config::proof::{PROTOCOL, is_too_long};
use crate::limits::HANDSHAKE_BYTES;

/// Bytes that wait to be sent, at most.
const WAITING_MAX: usize = 64 << 10;
/// Times that the socket is read in a turn.
const READS_PER_TURN: usize = 4;
/// Bytes that the other side sends until both have shown what they are to show, at most: its
/// certificates, and the names of CAs.
const SHOWN_MAX: usize = 28 << 10;
const _: () = assert!(
    (32 << 10) + (SHOWN_MAX / 6).next_power_of_two() * 56 + SHOWN_MAX / 6 * 32 <= HANDSHAKE_BYTES
);

/// See the module's doc.
#[derive(Debug)]
pub(super) struct Conn {
    socket: TcpStream,
    tls: Box<Connection>,
    /// Bytes that the other side has sent before it had shown all.
    shown: usize,
    /// The socket may have something.
    pub(super) is_ready: bool,
}

impl Conn {
    /// Over a socket that does not block, and may not be connected yet.
    pub(super) fn new(socket: OwnedFd, mut tls: Connection) -> Self {
        tls.set_buffer_limit(Some(WAITING_MAX));
        Self { socket: socket.into(), tls: Box::new(tls), shown: 0, is_ready: true }
    }

    /// The state of its socket in which a turn does something.
    pub(super) fn polled(&self) -> PollFd<'_> {
        let out = if self.tls.wants_write() { PollFlags::OUT } else { PollFlags::empty() };
        let flags = if self.tls.wants_read() { out | PollFlags::IN } else { out };
        PollFd::from_borrowed_fd(self.socket.as_fd(), flags)
    }

    /// Whether both sides have shown what they are to show. (A client finds out later whether it
    /// was believed.)
    pub(super) fn is_open(&self) -> bool {
        !self.tls.is_handshaking()
    }

    /// Moves bytes, as many as there are.
    ///
    /// # Errors
    /// Its end, and why.
    pub(super) fn turn(&mut self) -> Result<(), String> {
        self.is_ready = false;
        for _ in 0..READS_PER_TURN {
            if !self.tls.wants_read() {
                break;
            }
            match self.tls.read_tls(&mut self.socket) {
                Ok(0) => return Err("it hung up".into()),
                Ok(len) => {
                    if let Err(e) = self.tls.process_new_packets() {
                        let _ = self.flush(); // it is told why
                        return Err(e.to_string());
                    }
                    self.look_at_shown(len)?;
                }
                Err(e) if is_later(&e) => break,
                Err(e) => return Err(e.to_string()),
            }
        }
        self.flush().map_err(|e| e.to_string())?;
        if self.is_open() && self.tls.alpn_protocol() != Some(PROTOCOL) {
            return Err("it speaks something else over TLS".into());
        }
        Ok(())
    }

    /// So many bytes have come.
    fn look_at_shown(&mut self, len: usize) -> Result<(), String> {
        if !self.is_open() {
            self.shown += len;
            if self.shown > SHOWN_MAX {
                return Err("it shows more than a host has to".into());
            }
        } else if self.tls.peer_certificates().is_some_and(is_too_long) {
            return Err("its certificates are too many or too long".into());
        }
        Ok(())
    }

    fn flush(&mut self) -> io::Result<()> {
        while self.tls.wants_write() {
            match self.tls.write_tls(&mut self.socket) {
                Ok(_) => {}
                Err(e) if is_later(&e) => return Ok(()),
                Err(e) => return Err(e),
            }
        }
        Ok(())
    }

    /// It is somebody else's from now on.
    pub(super) fn into_secured(self) -> Secured {
        Secured { socket: self.socket, tls: self.tls }
    }

    /// The certificate of the other side.
    pub(super) fn certificate(&self) -> Option<&CertificateDer<'static>> {
        self.tls.peer_certificates()?.first()
    }
}

fn is_later(e: &io::Error) -> bool {
    matches!(e.kind(), ErrorKind::WouldBlock | ErrorKind::Interrupted)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sockets::fabric::pipe::tests::{ends, sockets};

    /// Of a client, whose server shows so many certificates of so many bytes.
    fn shown(many: usize, len: usize) -> Result<(), String> {
        let chain = vec![CertificateDer::from(vec![7; len]); many];
        let (client, mut server) = ends(chain, None);
        let (ours, theirs) = sockets();
        let mut theirs = TcpStream::from(theirs);
        let mut conn = Conn::new(ours, client);
        loop {
            match conn.turn() {
                Err(why) if why == "it speaks something else over TLS" => return Ok(()),
                turn => turn?,
            }
            if server.read_tls(&mut theirs).is_ok() {
                server.process_new_packets().unwrap();
            }
            while server.wants_write() && server.write_tls(&mut theirs).is_ok() {}
        }
    }

    #[test]
    fn certificates_of_another_host_are_few_and_short() {
        assert_eq!(shown(1, 100), Ok(()));
        assert_eq!(shown(8, 2048), Ok(()));
        let too_long = Err("its certificates are too many or too long".to_owned());
        assert_eq!(shown(9, 100), too_long);
        assert_eq!(shown(1, (16 << 10) + 1), too_long);
        assert_eq!(shown(4000, 1), too_long);
        assert_eq!(shown(9000, 1), Err("it shows more than a host has to".to_owned()));
    }
}
