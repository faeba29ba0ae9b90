//! The way of a stream's bytes: a socket, or TLS over it.
//!
//! A [`Sealed`] one has buffers of its own between the socket and whoever asks:
//!
//! - Records are read from the socket only while no plaintext is left, so what has no place with
//!   its guest stays in the kernel, but for one read. Nobody waits for an event with plaintext in
//!   hand: `WouldBlock` means that the socket was asked and had nothing, or [`Pipe::take_more`].
//! - Bytes are encrypted only when all before them are with the socket, at most [`SEALED_AT_ONCE`]
//!   of them. Those that the socket has not taken are [`Pipe::held`] and count as waiting; all
//!   others wait in the stream, as bytes for a plain socket do.
//! - Reading in a turn is bounded by what it costs ([`COST_MAX`]), not by the plaintext that it
//!   brings: another host may send records of a byte, and others that change keys between them.
//!
//! Keys are changed by rustls before it has used them too often. An end of the other side's is an
//! end of the stream, whether it was said (close_notify) or not: a connection of guests that has
//! not ended by then is lost.

use std::io::{self, BufRead, ErrorKind, Read, Write};
use std::net::TcpStream;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::io::{read, write};
use rustls::Connection;

use crate::sockets::trust::Secured;

/// Bytes that are encrypted at once: what rustls keeps at most ([`Secured`]).
pub(super) const SEALED_AT_ONCE: usize = 64 << 10;
const _: () = assert!(READ_MAX + NOTHING_MAX + 4096 <= 32 << 10);
/// Bytes that are read at once, at most: some 300 records of the shortest kind, each of which costs
/// a few microseconds if it changes keys.
const READ_MAX: usize = 8 << 10;
/// The cost of a pipe before others have their turn. A byte of plaintext costs 1, and a byte of the
/// wire that brought none this many: so this is 32 KiB of records that change keys, which take 4
/// ms. A record of full length is 16 KiB, and costs half of it until all of it is there.
pub(super) const COST_MAX: usize = 512 << 10;
const COST_IN_VAIN: usize = 16;
/// A read costs as much as so many bytes of the wire that bring nothing.
const BYTES_OF_A_READ: usize = 64;
/// The dearest of all reads.
pub(super) const COST_OF_A_READ_MAX: usize = COST_IN_VAIN * (READ_MAX + BYTES_OF_A_READ);
/// Bytes of the wire that bring no plaintext, in a row: more than a record of full length has,
/// 16,406 without padding, with changes of keys before it. More than that is an unfinished message
/// of a handshake, which rustls keeps until it is all there, up to 64 KiB.
const NOTHING_MAX: usize = 20 << 10;

/// See the module's doc.
#[derive(Debug)]
pub(super) enum Pipe {
    Plain(OwnedFd),
    Sealed(Sealed),
}

/// A connection over TLS, whose handshake is done.
#[derive(Debug)]
pub(super) struct Sealed {
    socket: TcpStream,
    tls: Box<Connection>,
    /// Of the bytes that were encrypted, about so many are not with the socket.
    held: usize,
    /// There may be more to read, and no event will say so.
    has_more: bool,
    /// Bytes of the wire that were read in this turn, and of plaintext that they brought.
    wire: usize,
    plain: usize,
    /// Bytes of the wire that were read since plaintext last came.
    nothing: usize,
    /// Its fault.
    why: Option<String>,
}

impl Pipe {
    /// Reads what is there into `bytes`, which are some. 0: its end.
    ///
    /// # Errors
    /// The socket's, and `InvalidData`.
    pub(super) fn read(&mut self, bytes: &mut [u8]) -> io::Result<usize> {
        match self {
            Self::Plain(socket) => Ok(read(socket, bytes)?),
            Self::Sealed(it) => {
                it.fill()?;
                it.tls.reader().read(bytes)
            }
        }
    }

    /// Takes some of these bytes, in their order; how many.
    ///
    /// # Errors
    /// As of [`Self::read`].
    pub(super) fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        match self {
            Self::Plain(socket) => Ok(write(socket, bytes)?),
            Self::Sealed(it) => it.write(bytes),
        }
    }

    /// Of the bytes that it has taken, those that the socket has not: no more than were taken last.
    pub(super) const fn held(&self) -> usize {
        match self {
            Self::Plain(_) => 0,
            Self::Sealed(it) => it.held,
        }
    }

    /// Whether bytes are encrypted.
    pub(super) const fn is_sealed(&self) -> bool {
        matches!(self, Self::Sealed(_))
    }

    /// It may cost as much as before, from now on.
    pub(super) const fn begin_turn(&mut self) {
        if let Self::Sealed(it) = self {
            (it.wire, it.plain) = (0, 0);
        }
    }

    /// Reading in this turn has cost so much, in bytes of plaintext; see [`COST_MAX`].
    pub(super) const fn cost(&self) -> usize {
        match self {
            Self::Plain(_) => 0,
            Self::Sealed(it) => it.cost(),
        }
    }

    /// Whether there may be more to read of which no event tells. Once.
    pub(super) fn take_more(&mut self) -> bool {
        match self {
            Self::Plain(_) => false,
            Self::Sealed(it) => std::mem::take(&mut it.has_more),
        }
    }

    /// The fault of TLS, if there was one.
    pub(super) fn why(&self) -> Option<&str> {
        match self {
            Self::Plain(_) => None,
            Self::Sealed(it) => it.why.as_deref(),
        }
    }
}

impl AsFd for Pipe {
    fn as_fd(&self) -> BorrowedFd<'_> {
        match self {
            Self::Plain(socket) => socket.as_fd(),
            Self::Sealed(it) => it.socket.as_fd(),
        }
    }
}

impl From<OwnedFd> for Pipe {
    fn from(socket: OwnedFd) -> Self {
        Self::Plain(socket)
    }
}

impl From<Secured> for Pipe {
    fn from(Secured { socket, tls }: Secured) -> Self {
        let held = usize::from(tls.wants_write()); // the last of the handshake
        let (has_more, why) = (false, None);
        Self::Sealed(Sealed { socket, tls, held, has_more, wire: 0, plain: 0, nothing: 0, why })
    }
}

/// A socket, of which not much is read at once.
struct Sips<'s>(&'s mut TcpStream);

impl Read for Sips<'_> {
    fn read(&mut self, bytes: &mut [u8]) -> io::Result<usize> {
        let len = bytes.len().min(READ_MAX);
        self.0.read(&mut bytes[..len])
    }
}

impl Sealed {
    const fn cost(&self) -> usize {
        self.plain + COST_IN_VAIN * self.wire.saturating_sub(self.plain)
    }

    /// Sees to it that there is plaintext.
    ///
    /// # Errors
    /// WouldBlock: there is none now. UnexpectedEof and others: its end.
    fn fill(&mut self) -> io::Result<()> {
        if self.why.is_some() {
            return Err(ErrorKind::InvalidData.into());
        }
        loop {
            match self.tls.reader().into_first_chunk() {
                Ok([]) => return Err(ErrorKind::UnexpectedEof.into()), // close_notify
                Ok(_) => return Ok(()),
                Err(e) if e.kind() == ErrorKind::WouldBlock => {}
                Err(e) => return Err(e),
            }
            if self.cost() >= COST_MAX {
                // It may have come with the last read; a read more that finds nothing does no harm.
                self.has_more = true;
                return Err(ErrorKind::WouldBlock.into());
            }
            let read = self.tls.read_tls(&mut Sips(&mut self.socket))?;
            if read == 0 {
                return Err(ErrorKind::UnexpectedEof.into());
            }
            match self.tls.process_new_packets() {
                Ok(state) => {
                    let plain = state.plaintext_bytes_to_read();
                    self.wire += read + BYTES_OF_A_READ;
                    self.plain += plain;
                    self.nothing = if plain > 0 { 0 } else { self.nothing + read };
                    self.look_at_rest()?;
                }
                Err(e) => {
                    let _ = self.flush(); // the other host is told why
                    return Err(self.refuse(&e.to_string()));
                }
            }
        }
    }

    /// Messages that TLS allows and no host of ours sends.
    ///
    /// # Errors
    /// InvalidData: the other host has sent it.
    fn look_at_rest(&mut self) -> io::Result<()> {
        let tickets = match &*self.tls {
            Connection::Client(client) => client.tls13_tickets_received(),
            Connection::Server(_) => 0,
        };
        if tickets > 0 {
            // Each costs a copy of the certificates; and many may be in one record.
            return Err(self.refuse("it tells how to resume a connection, which nobody does"));
        }
        if self.nothing > NOTHING_MAX {
            return Err(self.refuse("it sends much that is no data"));
        }
        Ok(())
    }

    fn refuse(&mut self, why: &str) -> io::Error {
        self.why = Some(why.into());
        io::Error::new(ErrorKind::InvalidData, why)
    }

    /// Passes on plaintext, `len` bytes at most, to `take`, which has the number of bytes before;
    /// how many. `false` of that: there is no place for them.
    ///
    /// # Errors
    /// As of [`Self::fill`], if there was none; `Other` if there is no place.
    pub(super) fn deliver(
        &mut self,
        len: usize,
        mut take: impl FnMut(usize, &[u8]) -> bool,
    ) -> io::Result<usize> {
        let mut done = 0;
        while done < len {
            match self.fill() {
                Ok(()) => {}
                Err(e) if done == 0 => return Err(e),
                Err(_) => break, // it is so the next time, too
            }
            let mut reader = self.tls.reader();
            let chunk = reader.fill_buf()?;
            let now = chunk.len().min(len - done);
            if !take(done, &chunk[..now]) {
                return Err(ErrorKind::Other.into());
            }
            reader.consume(now);
            done += now;
        }
        Ok(done)
    }

    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.flush()?;
        if bytes.is_empty() {
            return Ok(0);
        }
        let now = bytes.len().min(SEALED_AT_ONCE);
        let taken = self.tls.writer().write(&bytes[..now])?;
        self.held = taken;
        match self.flush() {
            Err(e) if e.kind() != ErrorKind::WouldBlock => Err(e),
            _ => Ok(taken),
        }
    }

    /// Gives the socket what was encrypted.
    ///
    /// # Errors
    /// The socket's. WouldBlock: it has not taken all.
    fn flush(&mut self) -> io::Result<()> {
        while self.tls.wants_write() {
            let given = self.tls.write_tls(&mut self.socket);
            if given.as_ref().is_err_and(|e| e.kind() == ErrorKind::Interrupted) {
                continue;
            }
            // Bytes that records add are not counted: so it is never more than what was encrypted,
            // nor grows.
            self.held = self.held.saturating_sub(*given.as_ref().unwrap_or(&0)).max(1);
            if given? == 0 {
                return Err(ErrorKind::WriteZero.into());
            }
        }
        self.held = 0;
        Ok(())
    }
}

#[cfg(test)]
pub(in crate::sockets) mod tests {
    use std::sync::Arc;

    use rustix::io::ioctl_fionread;
    use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};
    use rustls::client::Resumption;
    use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
    use rustls::pki_types::{CertificateDer, PrivatePkcs8KeyDer, ServerName, UnixTime};
    use rustls::server::ProducesTickets;
    use rustls::sign::{CertifiedKey, SingleCertAndKey};
    use rustls::{
        ClientConfig, ClientConnection, DigitallySignedStruct, Error, ServerConfig,
        ServerConnection, SignatureScheme,
    };

    use super::*;

    /// A client that believes everything: here it is not about that.
    #[derive(Debug)]
    struct Credulous;

    impl ServerCertVerifier for Credulous {
        fn verify_server_cert(
            &self,
            _: &CertificateDer<'_>,
            _: &[CertificateDer<'_>],
            _: &ServerName<'_>,
            _: &[u8],
            _: UnixTime,
        ) -> Result<ServerCertVerified, Error> {
            Ok(ServerCertVerified::assertion())
        }

        fn verify_tls12_signature(
            &self,
            _: &[u8],
            _: &CertificateDer<'_>,
            _: &DigitallySignedStruct,
        ) -> Result<HandshakeSignatureValid, Error> {
            Ok(HandshakeSignatureValid::assertion())
        }

        fn verify_tls13_signature(
            &self,
            _: &[u8],
            _: &CertificateDer<'_>,
            _: &DigitallySignedStruct,
        ) -> Result<HandshakeSignatureValid, Error> {
            Ok(HandshakeSignatureValid::assertion())
        }

        fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
            vec![SignatureScheme::ED25519]
        }
    }

    /// Tickets of so many bytes, which are for nobody.
    #[derive(Debug)]
    struct Tickets(usize);

    impl ProducesTickets for Tickets {
        fn enabled(&self) -> bool {
            true
        }

        fn lifetime(&self) -> u32 {
            7
        }

        fn encrypt(&self, _: &[u8]) -> Option<Vec<u8>> {
            Some(vec![7; self.0])
        }

        fn decrypt(&self, _: &[u8]) -> Option<Vec<u8>> {
            None
        }
    }

    /// A client and a server that shows these certificates, and tells the client a ticket of so
    /// many bytes.
    pub(in crate::sockets) fn ends(
        chain: Vec<CertificateDer<'static>>,
        ticket: Option<usize>,
    ) -> (Connection, Connection) {
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let config = ClientConfig::builder_with_provider(Arc::clone(&provider));
        let client = config.with_protocol_versions(&[&rustls::version::TLS13]).unwrap();
        let client = client.dangerous().with_custom_certificate_verifier(Arc::new(Credulous));
        let mut client = client.with_no_client_auth();
        client.resumption = Resumption::disabled();
        // PKCS #8 of an Ed25519 key (RFC 8410 section 7), which is 32 bytes of 7.
        let head = [0x30, 0x2e, 2, 1, 0, 0x30, 5, 6, 3, 0x2b, 0x65, 0x70, 4, 0x22, 4, 0x20];
        let key = PrivatePkcs8KeyDer::from([&head[..], &[7; 32]].concat());
        let key = rustls::crypto::ring::sign::any_eddsa_type(&key).unwrap();
        let key = CertifiedKey::new(chain, key);
        let config = ServerConfig::builder_with_provider(provider);
        let server = config.with_protocol_versions(&[&rustls::version::TLS13]).unwrap();
        let server = server.with_no_client_auth();
        let mut server = server.with_cert_resolver(Arc::new(SingleCertAndKey::from(key)));
        server.send_tls13_tickets = ticket.iter().len();
        server.ticketer = Arc::new(Tickets(ticket.unwrap_or(0)));
        let client = ClientConnection::new(Arc::new(client), ServerName::try_from("h").unwrap());
        (client.unwrap().into(), ServerConnection::new(Arc::new(server)).unwrap().into())
    }

    /// The other end of a sealed pipe.
    pub(in super::super) struct Other {
        pub(in super::super) socket: TcpStream,
        pub(in super::super) tls: Connection,
    }

    impl Other {
        /// The records with these bytes.
        pub(in super::super) fn seal(&mut self, bytes: &[u8]) -> Vec<u8> {
            self.tls.writer().write_all(bytes).unwrap();
            let mut records = Vec::new();
            while self.tls.wants_write() {
                self.tls.write_tls(&mut records).unwrap();
            }
            records
        }
    }

    /// A sealed pipe over these sockets, which do not block, and its other end.
    pub(in super::super) fn sealed(sockets: (OwnedFd, OwnedFd)) -> (Pipe, Other) {
        sealed_with(sockets, None)
    }

    fn sealed_with((ours, theirs): (OwnedFd, OwnedFd), ticket: Option<usize>) -> (Pipe, Other) {
        let chain = vec![CertificateDer::from(vec![7; 100])];
        let (mut client, mut server) = ends(chain, ticket);
        let mut sockets = [TcpStream::from(ours), TcpStream::from(theirs)];
        while client.is_handshaking() || server.is_handshaking() {
            for (tls, socket) in [&mut client, &mut server].into_iter().zip(&mut sockets) {
                while tls.wants_write() {
                    tls.write_tls(socket).unwrap();
                }
                if tls.read_tls(socket).is_ok() {
                    tls.process_new_packets().unwrap();
                }
            }
        }
        let [ours, theirs] = sockets;
        client.set_buffer_limit(Some(SEALED_AT_ONCE));
        server.set_buffer_limit(None);
        let pipe = Secured { socket: ours, tls: Box::new(client) }.into();
        (pipe, Other { socket: theirs, tls: server })
    }

    pub(in crate::sockets) fn sockets() -> (OwnedFd, OwnedFd) {
        let flags = SocketFlags::NONBLOCK | SocketFlags::CLOEXEC;
        socketpair(AddressFamily::UNIX, SocketType::STREAM, flags, None).unwrap()
    }

    fn would_block<T>(result: io::Result<T>) -> bool {
        result.is_err_and(|e| e.kind() == ErrorKind::WouldBlock)
    }

    fn of(pipe: &mut Pipe) -> &mut Sealed {
        let Pipe::Sealed(it) = pipe else { panic!("it is sealed") };
        it
    }

    #[test]
    fn plaintext_that_waits_is_found_though_the_socket_has_nothing_more() {
        let (mut pipe, mut other) = sealed(sockets());
        assert!(would_block(pipe.read(&mut [0; 9])));
        let said: Vec<u8> = (0..50_000_u32).map(|n| n.to_le_bytes()[0]).collect();
        let records = other.seal(&said);
        other.socket.write_all(&records).unwrap();
        let mut got = Vec::<u8>::new();
        while got.len() < said.len() {
            // In parts that are no record's, and now and then there is no place.
            let no_place = of(&mut pipe).deliver(7, |_, _| false);
            assert_eq!(no_place.unwrap_err().kind(), ErrorKind::Other);
            let before = got.len();
            let take = |at, bytes: &[u8]| {
                assert_eq!(before + at, got.len());
                got.extend(bytes);
                true
            };
            let len = of(&mut pipe).deliver(20_001, take).unwrap();
            assert_eq!(len, 20_001.min(said.len() - before), "all that there is");
        }
        assert_eq!(got, said);
        assert!(would_block(of(&mut pipe).deliver(1, |_, _| true)) && !pipe.take_more());
    }

    #[test]
    fn a_record_that_is_half_there_is_no_reason_to_look_again_at_once() {
        let (mut pipe, mut other) = sealed(sockets());
        let records = other.seal(&[1; 9000]);
        let (first, second) = records.split_at(5000);
        other.socket.write_all(first).unwrap();
        assert!(would_block(pipe.read(&mut [0; 9])) && !pipe.take_more());
        other.socket.write_all(second).unwrap();
        assert_eq!(pipe.read(&mut [0; 9000]).unwrap(), 9000);
    }

    #[test]
    fn tickets_of_tls_and_messages_of_handshakes_that_do_not_end_are_not_kept() {
        // One ticket, and the beginning of one with so many bytes.
        for (ticket, sent, why) in
            [(100, 1000, "resume"), (60_000, 19_000, ""), (60_000, 31_000, "no data")]
        {
            let (mut pipe, mut other) = sealed_with(sockets(), Some(ticket));
            let records = other.seal(&[1]);
            assert!(records.len() > ticket);
            other.socket.write_all(&records[..sent.min(records.len())]).unwrap();
            let mut got = [0; 9];
            while pipe.read(&mut got).is_err_and(|e| e.kind() == ErrorKind::WouldBlock)
                && pipe.take_more()
            {
                pipe.begin_turn();
            }
            assert!(pipe.why().unwrap_or("").contains(why), "{ticket}: {:?}", pipe.why());
            assert_eq!(pipe.why().is_none(), why.is_empty(), "{ticket}: {sent}");
        }
    }

    #[test]
    fn keys_that_the_other_host_changes_are_changed() {
        let (mut pipe, mut other) = sealed(sockets());
        for n in 0..100 {
            other.tls.refresh_traffic_keys().unwrap();
            let records = other.seal(&[n]);
            other.socket.write_all(&records).unwrap();
            let mut got = [0];
            assert_eq!((pipe.read(&mut got).unwrap(), got), (1, [n]));
            // It is answered by a change of its own, before the next bytes.
            assert_eq!(pipe.write(&[n, n]).unwrap(), 2);
            other.tls.read_tls(&mut other.socket).unwrap();
            other.tls.process_new_packets().unwrap();
            let mut got = [0; 9];
            assert_eq!((other.tls.reader().read(&mut got).unwrap(), got[0]), (2, n));
        }
    }

    #[test]
    fn a_read_is_short_however_much_there_is() {
        let (ours, theirs) = sockets();
        assert_eq!(rustix::io::write(&theirs, &[1; 50_000]).unwrap(), 50_000);
        let mut ours = TcpStream::from(ours);
        assert_eq!(Sips(&mut ours).read(&mut [0; 40_000]).unwrap(), READ_MAX);
        assert_eq!(Sips(&mut ours).read(&mut [0; 10]).unwrap(), 10);
    }

    #[test]
    fn short_records_with_changes_of_keys_between_them_are_read_a_few_in_a_turn() {
        let (mut pipe, mut other) = sealed(sockets());
        let mut records = Vec::new();
        for _ in 0..200 {
            // As many as rustls allows before a byte.
            for _ in 0..32 {
                other.tls.refresh_traffic_keys().unwrap();
            }
            records.extend(other.seal(&[7]));
        }
        let group = 32 * 27 + 23; // of 5 and 1 bytes, with a header, their kind and a tag
        assert_eq!(records.len(), 200 * group);
        let said = other.socket.write(&records).unwrap() / group;
        assert!(said > 100, "{said}");
        let (mut got, mut turns) = (0, 0);
        while got < said {
            pipe.begin_turn();
            let now = of(&mut pipe).deliver(65_536, |_, bytes| bytes.iter().all(|b| *b == 7));
            got += now.unwrap();
            turns += 1;
            assert!(of(&mut pipe).wire < COST_MAX / COST_IN_VAIN + 2 * READ_MAX);
            assert!(got == said || pipe.cost() >= COST_MAX && pipe.take_more(), "{got} of {said}");
        }
        assert!(turns >= said * group / (COST_MAX / COST_IN_VAIN + READ_MAX), "{turns}");
    }

    #[test]
    fn a_byte_that_was_changed_is_the_end_and_no_byte_behind_it_comes() {
        // The kind of the outer record is no part of what is protected (RFC 8446 section 5.2).
        for (at, matters) in [(0, false), (3, true), (5, true), (6, true), (50, true), (121, true)]
        {
            let (mut pipe, mut other) = sealed(sockets());
            let mut records = other.seal(&[1; 10]);
            let first = records.len();
            records.extend(other.seal(&[2; 100]));
            records.extend(other.seal(&[3; 10]));
            records[first + at] ^= 1;
            other.socket.write_all(&records).unwrap();
            drop(other);
            let mut got = Vec::<u8>::new();
            let mut read = || {
                let mut bytes = [0; 200];
                let len = pipe.read(&mut bytes)?;
                got.extend(&bytes[..len]);
                Ok::<_, io::Error>(len)
            };
            while read().is_ok_and(|len| len > 0) {}
            assert!(read().is_err(), "and stays so");
            let whole = [&[1; 10][..], &[2; 100], &[3; 10]].concat();
            let comes = if matters { &whole[..10] } else { &whole };
            assert!(comes.starts_with(&got) && (matters || got == comes), "byte {at}: {got:?}");
        }
    }

    #[test]
    fn what_the_socket_does_not_take_is_held_and_is_bounded() {
        let (mut pipe, mut other) = sealed(sockets());
        let said: Vec<u8> = (0..2_000_000_u32).map(|n| n.to_le_bytes()[1]).collect();
        let (mut rest, mut got, mut was_held) = (&said[..], Vec::<u8>::new(), false);
        let (mut taken, sent) = (0, |rest: &[u8]| said.len() - rest.len());
        while got.len() < said.len() {
            let before = rest.len() + pipe.held();
            match pipe.write(rest) {
                Ok(len) => rest = &rest[len..],
                Err(e) => assert_eq!(e.kind(), ErrorKind::WouldBlock),
            }
            assert!(pipe.held() <= SEALED_AT_ONCE && rest.len() + pipe.held() <= before);
            was_held |= pipe.held() > 0;
            // Nothing is anywhere else, and records add a little.
            let on_its_way = usize::try_from(ioctl_fionread(&other.socket).unwrap()).unwrap();
            let known = pipe.held() + on_its_way + taken;
            assert!((sent(rest)..sent(rest) * 11 / 10 + 100).contains(&known), "{known}");
            let mut bytes = vec![0; 30_000];
            if let Ok(len) = other.tls.read_tls(&mut other.socket) {
                taken += len;
                other.tls.process_new_packets().unwrap();
            }
            while let Ok(len) = other.tls.reader().read(&mut bytes) {
                got.extend(&bytes[..len]);
            }
        }
        assert!(got == said && was_held && pipe.held() == 0 && rest.is_empty());
    }

    #[test]
    fn an_end_is_one_whether_it_was_said_or_not() {
        for is_said in [true, false] {
            let (mut pipe, mut other) = sealed(sockets());
            let mut records = other.seal(b"last");
            if is_said {
                other.tls.send_close_notify();
                records.extend(other.seal(&[]));
            }
            other.socket.write_all(&records).unwrap();
            let _open = is_said.then_some(other); // or it is closed
            assert_eq!(pipe.read(&mut [0; 9]).unwrap(), 4);
            for _ in 0..2 {
                assert_eq!(pipe.read(&mut [0; 9]).unwrap_err().kind(), ErrorKind::UnexpectedEof);
            }
        }
    }
}
