//! Another host's bytes in a TLS stream of the virtual TOE: `daemon`'s reader of it, over a socket,
//! after a valid handshake.
//!
//! Input: operations. The other host writes records of any length, changes keys, sends bytes that
//! are no records, and says its end; any part of that is on its way at a time; the guest has places
//! for parts of any length, or none. All messages were sent, in this order; none comes behind bytes
//! that are no records; a turn keeps to its budget; and readable bytes are read without another
//! event.

use std::io::{ErrorKind, Read, Write};
use std::net::TcpStream;
use std::sync::Arc;

use arbitrary::Unstructured;
use nightporterd::sockets::SealedReader;
use rustix::io::ioctl_fionread;
use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};
use rustls::client::Resumption;
use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use rustls::pki_types::{CertificateDer, PrivatePkcs8KeyDer, ServerName, UnixTime};
use rustls::sign::{CertifiedKey, SingleCertAndKey};
use rustls::{
    ClientConfig, ClientConnection, Connection, DigitallySignedStruct, Error, ServerConfig,
    ServerConnection, SignatureScheme,
};

use crate::noise;

const OPS_MAX: usize = 100;
/// Bytes that the other host says, at most: less than a socket takes.
const SAID_MAX: usize = 100_000;
/// Messages of a handshake in a row that rustls takes.
const CHANGES_MAX: usize = 32;

/// Judges one input.
pub fn run(data: &[u8]) {
    let mut u = Unstructured::new(data);
    let mut world = World::new();
    for _ in 0..OPS_MAX {
        if u.is_empty() || world.step(&mut u).is_err() {
            break;
        }
    }
    world.ends();
}

/// Hosts that say a little of everything.
#[must_use]
pub fn seeds() -> Vec<Vec<u8>> {
    (1..8).map(|n| noise(n, 100 * n as usize)).collect()
}

/// A verifier that accepts everything: certificates are not the subject here.
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

/// A connection, behind its handshake: this host's end, and the other host's.
fn connected(sockets: &mut [TcpStream; 2]) -> [Connection; 2] {
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let versions = &[&rustls::version::TLS13];
    let client = ClientConfig::builder_with_provider(Arc::clone(&provider));
    let client = client.with_protocol_versions(versions).expect("a version that there is");
    let client = client.dangerous().with_custom_certificate_verifier(Arc::new(Credulous));
    let mut client = client.with_no_client_auth();
    client.resumption = Resumption::disabled();
    // PKCS #8 of an Ed25519 key (RFC 8410 section 7), which is 32 bytes of 7.
    let head = [0x30, 0x2e, 2, 1, 0, 0x30, 5, 6, 3, 0x2b, 0x65, 0x70, 4, 0x22, 4, 0x20];
    let key = PrivatePkcs8KeyDer::from([&head[..], &[7; 32]].concat());
    let key = rustls::crypto::ring::sign::any_eddsa_type(&key).expect("it is a key");
    let key = CertifiedKey::new(vec![CertificateDer::from(vec![7; 100])], key);
    let server = ServerConfig::builder_with_provider(provider);
    let server = server.with_protocol_versions(versions).expect("a version that there is");
    let server = server.with_no_client_auth();
    let mut server = server.with_cert_resolver(Arc::new(SingleCertAndKey::from(key)));
    server.send_tls13_tickets = 0;
    let name = ServerName::try_from("h").expect("a name");
    let client = ClientConnection::new(Arc::new(client), name).expect("a client");
    let server = ServerConnection::new(Arc::new(server)).expect("a server");
    let mut ends: [Connection; 2] = [client.into(), server.into()];
    while ends.iter().any(|tls| tls.is_handshaking()) {
        for (tls, socket) in ends.iter_mut().zip(&mut *sockets) {
            while tls.wants_write() {
                tls.write_tls(socket).expect("it has room");
            }
            if tls.read_tls(socket).is_ok() {
                tls.process_new_packets().expect("it is right");
            }
        }
    }
    ends
}

struct World {
    reader: SealedReader,
    /// Another descriptor of the reader's socket.
    ours: TcpStream,
    /// The other host's end.
    theirs: TcpStream,
    tls: Connection,
    /// Records that are not on their way yet.
    records: Vec<u8>,
    /// Plaintext that it says, and so much of it has come.
    said: Vec<u8>,
    heard: usize,
    /// Changes of keys since.
    changes: usize,
    /// It has said its end, or what is no record: nothing that it says behind that is heard.
    has_ended: bool,
    is_wrong: bool,
    /// Plaintext of this host, and so much of it was taken, and has come.
    told: Vec<u8>,
    taken: usize,
    arrived: usize,
}

impl World {
    fn new() -> Self {
        let flags = SocketFlags::NONBLOCK | SocketFlags::CLOEXEC;
        let pair = socketpair(AddressFamily::UNIX, SocketType::STREAM, flags, None);
        let pair = pair.expect("two sockets");
        let mut sockets: [TcpStream; 2] = [pair.0.into(), pair.1.into()];
        let [client, mut tls] = connected(&mut sockets);
        tls.set_buffer_limit(None);
        let [ours, theirs] = sockets;
        let socket = ours.try_clone().expect("a descriptor");
        Self {
            reader: SealedReader::new(socket, Box::new(client)),
            ours,
            theirs,
            tls,
            records: Vec::new(),
            said: Vec::new(),
            heard: 0,
            changes: 0,
            has_ended: false,
            is_wrong: false,
            told: Vec::new(),
            taken: 0,
            arrived: 0,
        }
    }

    fn step(&mut self, u: &mut Unstructured<'_>) -> arbitrary::Result<()> {
        match u.int_in_range(0..=12)? {
            0 => self.says(u.int_in_range(1..=40_000)?),
            1 | 2 => self.says(u.int_in_range(1..=100)?),
            3 => self.changes_keys(u.int_in_range(1..=33)?),
            4 if u.ratio(1, 8)? => self.says_nonsense(u)?,
            5 if u.ratio(1, 8)? => self.says_its_end(),
            6 => self.sends(u.int_in_range(1..=100)?),
            7 | 8 => self.sends(usize::MAX),
            9 => self.tells(u.int_in_range(1..=50_000)?),
            10 => {
                // There is no place for it: it is not taken, and stays.
                let kind = self.reader.receive(1, true).map_err(|e| e.kind());
                assert!(kind.is_err(), "bytes that have no place are heard");
            }
            11 => self.reader.begin_turn(),
            _ => drop(self.hears(u.int_in_range(1..=70_000)?)),
        }
        assert!(self.reader.cost() <= SealedReader::COST_MAX, "{}", self.reader.cost());
        Ok(())
    }

    /// Adds the output of the other host's TLS to its bytes.
    fn seals(&mut self) {
        while self.tls.wants_write() {
            self.tls.write_tls(&mut self.records).expect("a vector takes all");
        }
    }

    fn says(&mut self, len: usize) {
        if !self.has_ended && self.said.len() + len <= SAID_MAX {
            let said = noise(u32::try_from(self.said.len()).expect("small"), len);
            self.tls.writer().write_all(&said).expect("a buffer without a limit");
            self.said.extend(said);
            self.changes = 0;
            self.seals();
        }
    }

    fn changes_keys(&mut self, times: usize) {
        for _ in 0..times {
            if !self.has_ended && self.records.len() < SAID_MAX {
                self.tls.refresh_traffic_keys().expect("it speaks TLS 1.3");
                self.changes += 1;
                self.is_wrong |= self.changes > CHANGES_MAX;
                self.seals();
            }
        }
    }

    fn says_nonsense(&mut self, u: &mut Unstructured<'_>) -> arbitrary::Result<()> {
        let len = u.int_in_range(1..=64)?;
        let bytes = u.bytes(usize::min(len, u.len()))?.to_vec();
        self.records.extend(bytes);
        (self.has_ended, self.is_wrong) = (true, true);
        Ok(())
    }

    fn says_its_end(&mut self) {
        self.tls.send_close_notify();
        self.seals();
        self.has_ended = true;
    }

    fn sends(&mut self, len: usize) {
        let len = len.min(self.records.len());
        match self.theirs.write(&self.records[..len]) {
            Ok(len) => drop(self.records.drain(..len)),
            Err(e) if e.kind() == ErrorKind::WouldBlock => {}
            Err(e) => panic!("{e}"),
        }
    }

    /// This host sends bytes of its own, and the other one hears them.
    fn tells(&mut self, len: usize) {
        if self.told.len() + len <= SAID_MAX {
            self.told.extend(noise(7, len));
        }
        if self.reader.send(&self.told[self.taken..]).is_ok_and(|taken| {
            self.taken += taken;
            true
        }) {
            assert!(self.reader.held() <= SealedReader::HELD_MAX);
        }
        while self.tls.read_tls(&mut self.theirs).is_ok_and(|len| len > 0) {
            if self.tls.process_new_packets().is_err() {
                break; // this host's alert, at most
            }
        }
        let mut bytes = [0; 4096];
        while let Ok(len @ 1..) = self.tls.reader().read(&mut bytes) {
            assert_eq!(bytes[..len], self.told[self.arrived..self.arrived + len]);
            self.arrived += len;
        }
        self.seals(); // changes of keys are answered
    }

    /// The guest takes what there is. `false`: it is the end.
    fn hears(&mut self, room: usize) -> bool {
        match self.reader.receive(room, false) {
            Ok(plain) => {
                assert!(!plain.is_empty() && plain.len() <= room);
                assert_eq!(plain, self.said[self.heard..self.heard + plain.len()]);
                self.heard += plain.len();
                true
            }
            Err(e) if e.kind() == ErrorKind::WouldBlock => {
                // A wait for an event returns one now.
                let unread = ioctl_fionread(&self.ours).expect("it is a socket");
                assert!(self.reader.take_more() || unread == 0, "{unread} bytes wait for ever");
                true
            }
            Err(e) => {
                assert!(self.has_ended || self.is_wrong, "{e}");
                false
            }
        }
    }

    /// All is sent, and then no more: what was said comes, and an end.
    fn ends(mut self) {
        let mut goes_on = true;
        while goes_on {
            let before =
                (self.heard, self.records.len(), ioctl_fionread(&self.ours).expect("it is"));
            self.sends(usize::MAX);
            self.reader.begin_turn();
            goes_on = self.hears(1 << 20)
                && before
                    != (self.heard, self.records.len(), ioctl_fionread(&self.ours).expect("it is"));
        }
        assert!(self.is_wrong || self.heard == self.said.len(), "{} of it", self.heard);
        rustix::net::shutdown(&self.theirs, rustix::net::Shutdown::Write).expect("it is there");
        self.has_ended = true;
        self.reader.begin_turn();
        assert!(!self.hears(1), "its end is one");
        assert!(!self.hears(1), "and stays so");
    }
}
