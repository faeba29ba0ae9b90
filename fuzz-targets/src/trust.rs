//! Another host's proofs before it is trusted, and the files by which hosts are trusted: `daemon`'s
//! readers of certificates, of the beginning of TLS, and of files in PEM.
//!
//! Input: what it is, and the bytes, in pieces of any length. Conditions: a certificate is for an
//! address that is in it; a host that has not shown its identity cannot make this one read for
//! ever; files are right, or refused with words that fit into a line of the log.

use std::io::Write;
use std::net::{IpAddr, Ipv4Addr, TcpStream};
use std::os::fd::{AsRawFd, OwnedFd};
use std::path::PathBuf;
use std::sync::Arc;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use nightporter_registry::tls::Files;
use nightporterd::sockets::trust_rehearsal::{Stranger, files_prove, is_certificate_of};
use rustix::fs::{MemfdFlags, memfd_create};
use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};
use rustls::pki_types::{CertificateDer, PrivateKeyDer, PrivatePkcs8KeyDer};
use rustls::{RootCertStore, ServerConfig, ServerConnection};

use crate::noise;

/// Bytes that a host may send before it has shown who it is, with what is read at a time.
const SHOWN_MAX: usize = (28 << 10) + (64 << 10);
const HOST: Ipv4Addr = Ipv4Addr::new(192, 0, 2, 9);

/// Judges one input.
pub fn run(data: &[u8]) {
    let Some(([what, cut], bytes)) = data.split_first_chunk() else { return };
    let pieces: Vec<_> = bytes.chunks(usize::from(*cut) + 1).collect();
    match what % 3 {
        0 => certificate(bytes),
        1 => shows(&pieces),
        _ => files(bytes),
    }
}

fn certificate(der: &[u8]) {
    let other = Ipv4Addr::new(192, 0, 2, 10);
    let [is_hosts, is_others] = [HOST, other].map(|ip| {
        let is_its = is_certificate_of(der, ip.into());
        assert!(!is_its || has(der, &ip.octets()), "an address that is not in it");
        is_its
    });
    if der == certificate_of(HOST) {
        assert!(is_hosts && !is_others, "it is the host's");
    }
}

fn has(bytes: &[u8], part: &[u8]) -> bool {
    bytes.windows(part.len()).any(|window| window == part)
}

/// A stranger says this, and goes on with the same for as long as it is listened to.
fn shows(pieces: &[&[u8]]) {
    let flags = SocketFlags::NONBLOCK | SocketFlags::CLOEXEC;
    let pair = socketpair(AddressFamily::UNIX, SocketType::STREAM, flags, None);
    let (ours, theirs) = pair.expect("sockets");
    let mut theirs = TcpStream::from(theirs);
    let tls = ServerConnection::new(server()).expect("a server");
    let (mut stranger, mut said) = (Stranger::new(ours, tls.into()), 0);
    for piece in pieces.iter().cycle() {
        said += theirs.write(piece).unwrap_or(0);
        match stranger.turn() {
            Ok(is_open) => assert!(!is_open, "it has shown nothing"),
            Err(_) => break,
        }
        assert!(said <= SHOWN_MAX, "it is read for ever: {said}");
    }
}

/// A server that wants to see a certificate.
fn server() -> Arc<ServerConfig> {
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let mut roots = RootCertStore::empty();
    roots.add(certificate_of(HOST).into()).expect("a root");
    let verifier = rustls::server::WebPkiClientVerifier::builder_with_provider(
        Arc::new(roots),
        Arc::clone(&provider),
    );
    let config = ServerConfig::builder_with_provider(provider)
        .with_protocol_versions(&[&rustls::version::TLS13])
        .expect("a version that there is")
        .with_client_cert_verifier(verifier.build().expect("roots"))
        .with_single_cert(vec![CertificateDer::from(certificate_of(HOST))], key())
        .expect("its key");
    Arc::new(config)
}

/// Three files, one behind the other, divided by zeros: CA, certificates, key.
fn files(bytes: &[u8]) {
    let mut parts = bytes.splitn(3, |byte| *byte == 0);
    let [ca, chain, key] = [(); 3].map(|()| file(parts.next().unwrap_or_default()));
    let path = |file: &OwnedFd| PathBuf::from(format!("/proc/self/fd/{}", file.as_raw_fd()));
    let files = Files { ca: path(&ca), own: Some((path(&chain), path(&key))) };
    match files_prove(&files, IpAddr::V4(HOST)) {
        Ok(is_proved) => assert!(is_proved || bytes != right_files(), "they are right"),
        Err(e) => {
            let text = e.to_string();
            assert!(text.starts_with("/proc/self/fd/") && text.len() < 512, "{text}");
            assert!(!text.contains(char::is_control), "{text:?}");
            assert!(bytes != right_files(), "{text}");
        }
    }
}

fn file(bytes: &[u8]) -> OwnedFd {
    let file = memfd_create("pem", MemfdFlags::CLOEXEC).expect("memory");
    std::fs::File::from(file.try_clone().expect("a descriptor")).write_all(bytes).expect("room");
    file
}

/// Of each something that is right, and the beginning of a message that is longer than any.
#[must_use]
pub fn seeds() -> Vec<Vec<u8>> {
    let of = |what: u8, cut: u8, bytes: &[u8]| [&[what, cut], bytes].concat();
    let long = [&[22, 3, 1, 0x3f, 0xff, 1, 0, 0xff, 0xff][..], &vec![7; 0x3fff - 4]].concat();
    vec![
        of(0, 0, &certificate_of(HOST)),
        of(1, 255, &long),
        of(1, 200, &noise(5, 400)),
        of(2, 0, &right_files()),
        noise(6, 300),
    ]
}

fn right_files() -> Vec<u8> {
    let certificate = pem("CERTIFICATE", &certificate_of(HOST));
    let key = pem("PRIVATE KEY", key().secret_der());
    [certificate.as_bytes(), &[0], certificate.as_bytes(), &[0], key.as_bytes()].concat()
}

fn pem(what: &str, der: &[u8]) -> String {
    format!("-----BEGIN {what}-----\n{}\n-----END {what}-----\n", STANDARD.encode(der))
}

/// PKCS #8 of an Ed25519 key (RFC 8410 section 7), which is 32 bytes of 7.
fn key() -> PrivateKeyDer<'static> {
    let head = [0x30, 0x2e, 2, 1, 0, 0x30, 5, 6, 3, 0x2b, 0x65, 0x70, 4, 0x22, 4, 0x20];
    PrivatePkcs8KeyDer::from([&head[..], &[7; 32]].concat()).into()
}

/// A certificate (RFC 5280 section 4.1) of that key for an address, which nobody has signed.
fn certificate_of(ip: Ipv4Addr) -> Vec<u8> {
    let of = |tag: u8, parts: &[&[u8]]| {
        let body = parts.concat();
        let len = u16::try_from(body.len()).expect("short").to_be_bytes();
        match body.len() {
            0..128 => [&[tag, len[1]][..], &body].concat(),
            128..256 => [&[tag, 0x81, len[1]][..], &body].concat(),
            _ => [&[tag, 0x82, len[0], len[1]][..], &body].concat(),
        }
    };
    let key = match key() {
        PrivateKeyDer::Pkcs8(key) => rustls::crypto::ring::sign::any_eddsa_type(&key),
        _ => unreachable!("it is PKCS #8"),
    };
    let key = key.expect("a key");
    let public = rustls::sign::SigningKey::public_key(&*key).expect("its other half");
    let ed25519 = of(0x30, &[&of(6, &[&[0x2b, 0x65, 0x70]])]);
    let name = of(0x30, &[]);
    let time = |year: &str| of(0x17, &[format!("{year}0101000000Z").as_bytes()]);
    let ips = of(0x30, &[&of(0x87, &[&ip.octets()])]);
    let extension = of(0x30, &[&of(6, &[&[0x55, 0x1d, 0x11]]), &of(4, &[&ips])]);
    let to_be_signed = of(
        0x30,
        &[
            &of(0xa0, &[&of(2, &[&[2]])]),
            &of(2, &[&[1]]),
            &ed25519,
            &name,
            &of(0x30, &[&time("20"), &time("49")]),
            &name,
            public.as_ref(),
            &of(0xa3, &[&of(0x30, &[&extension])]),
        ],
    );
    of(0x30, &[&to_be_signed, &ed25519, &of(3, &[&[0], &[7; 64]])])
}
