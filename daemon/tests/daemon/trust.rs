//! Hosts that prove to each other by TLS who they are, and hosts that cannot. Needs root and
//! openssl.

use std::fs::File;
use std::io::{Read, Write};
use std::net::{IpAddr, TcpListener, TcpStream};
use std::path::Path;
use std::process::Command;
use std::sync::Arc;
use std::thread;

use nightporter_core::toe::control::Ask;
use nightporter_core::toe::errno::Errno;
use nightporter_core::toe::message::Kind;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName};
use rustls::server::WebPkiClientVerifier;
use rustls::{
    ClientConfig, ClientConnection, RootCertStore, ServerConfig, ServerConnection, StreamOwned,
};

use crate::fabric::{PORT, Stranger, configure, fabric, message};
use crate::host::{Dir, Host, LIMIT, run};
use crate::overlay::{Namespace, two_hosts};
use crate::sockets::{SocketGuest, ask, connect, listen, try_connect, until};
use crate::toe::{NATIVE, SERVER, boot, bytes, ends_one_after_the_other};

pub(crate) const PROOF_PORT: u16 = PORT + 1;
pub(crate) const PROTOCOL: &[u8] = b"nightporter-toe/1";

/// Of two CAs, for hosts with these last bytes: `ca.pem`, `ca-1.pem`, `ca-1.key`, `other.pem`, ...
pub(crate) fn certificates() -> Dir {
    let dir = Dir::new();
    let script = "new='-newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes'
        for ca in ca other; do
            openssl req -x509 $new -keyout $ca.key -out $ca.pem -days 2 -subj /CN=$ca \
                -addext basicConstraints=critical,CA:TRUE 2>/dev/null
            for n in 1 2 3; do
                openssl req $new -keyout $ca-$n.key -out csr -subj /O=host 2>/dev/null
                printf \"subjectAltName=IP:192.0.2.$n,IP:fd02::$n\\n\" >ext
                printf 'extendedKeyUsage=serverAuth,clientAuth\\n' >>ext
                openssl x509 -req -in csr -CA $ca.pem -CAkey $ca.key -CAcreateserial -days 2 \
                    -extfile ext -out $ca-$n.pem 2>/dev/null
            done
        done";
    let made = Command::new("sh").args(["-ec", script]).current_dir(dir.join(".")).status();
    assert!(made.unwrap().success(), "openssl");
    dir
}

/// Certificates of host `n` and its CA, in files of its own, which `show` replaces.
pub(crate) fn proof(dir: &Dir, from: &Dir, ca: &str, n: u8) -> String {
    show(dir, from, ca, n);
    let [ca, certificate, key] = ["ca.pem", "own.pem", "own.key"].map(|name| dir.join(name));
    let line = |key: &str, path: &Path| format!("{key} = \"{}\"\n", path.display());
    line("ca", &ca) + &line("certificate", &certificate) + &line("key", &key)
}

pub(crate) fn show(dir: &Dir, from: &Dir, ca: &str, n: u8) {
    let files = [
        (format!("{ca}.pem"), "ca.pem"),
        (format!("{ca}-{n}.pem"), "own.pem"),
        (format!("{ca}-{n}.key"), "own.key"),
    ];
    // The key of one does not go with the other's certificate: the last renews.
    for (its, own) in files {
        std::fs::copy(from.join(&its), dir.join("new")).unwrap();
        std::fs::rename(dir.join("new"), dir.join(own)).unwrap();
    }
}

/// A daemon on host `n` with a VM, which shows what this CA has given it, if any.
fn start(on: &Namespace, n: u8, vm: &str, proofs: Option<(&Dir, &str)>) -> (Dir, Host) {
    let dir = Dir::new();
    let toe = proofs.map_or_else(String::new, |(from, ca)| proof(&dir, from, ca, n));
    let config = configure(&dir, n, &toe, &[(vm, n, "")]);
    let log = File::create(dir.join("log")).unwrap();
    let host = on.enter(|| Host::start_with_log(&dir, &config, log.into()));
    (dir, host)
}

pub(crate) fn has_said(dir: &Dir, what: &str) -> bool {
    std::fs::read_to_string(dir.join("log")).unwrap().contains(what)
}

/// Two hosts with a guest each; each shows what the CA named for it has given it.
struct World {
    a: SocketGuest,
    b: SocketGuest,
    one: Host,
    two: Host,
    dirs: [Dir; 2],
    proofs: Dir,
    _names: (Namespace, Namespace),
}

fn world(of_one: Option<&str>, of_two: Option<&str>) -> World {
    let (names, proofs) = (two_hosts(), certificates());
    let (one_dir, one) = start(&names.0, 1, "a", of_one.map(|ca| (&proofs, ca)));
    let (two_dir, two) = start(&names.1, 2, "b", of_two.map(|ca| (&proofs, ca)));
    let (a, mut b) = (boot(&one_dir, "a"), boot(&two_dir, "b"));
    listen(&mut b, SERVER);
    World { a, b, one, two, dirs: [one_dir, two_dir], proofs, _names: names }
}

/// The guest's connection goes by guest TCP, before anything is visible.
pub(crate) fn is_native(a: &mut SocketGuest, to: &str) {
    match try_connect(a, to) {
        Ok(at) => {
            until(&mut [a], "nobody by TOE", |g| g[0].socket(at).is_reset);
            assert!(!a.socket(at).is_open);
            assert_eq!(ask(a, Ask::Describe(at)), NATIVE);
        }
        Err(code) => assert_eq!(code, NATIVE),
    }
}

#[test]
#[ignore = "needs root: it makes network namespaces; and openssl"]
fn hosts_that_prove_who_they_are_carry_the_bytes_of_many_connections() {
    let World { mut a, mut b, one, two, dirs, .. } = world(Some("ca"), Some("ca"));
    let (at_a, at_b) = connect(&mut a, &mut b, SERVER);
    let (up, down) = (bytes(1, 3_000_001), bytes(2, 1_234_567));
    a.write(at_a, &up);
    b.write(at_b, &down);
    until(&mut [&mut a, &mut b], "all is there", |g| {
        g[0].socket(at_a).got.len() == down.len() && g[1].socket(at_b).got.len() == up.len()
    });
    assert!(a.socket(at_a).got == down && b.socket(at_b).got == up);
    // More at once than there are tickets in stock.
    let many: Vec<_> = (0..200).map(|_| try_connect(&mut a, SERVER).unwrap()).collect();
    until(&mut [&mut a, &mut b], "all are open", |g| {
        many.iter().all(|at| g[0].socket(*at).is_open)
    });
    ends_one_after_the_other(&mut a, &mut b, at_a, at_b);
    let (of_one, of_two) = (fabric(&one), fabric(&two));
    assert_eq!((of_one.dialed, of_one.lost, of_one.unproven), (201, 0, 0));
    assert_eq!((of_two.accepted, of_two.lost, of_two.unproven), (201, 0, 0));
    until(&mut [], "it is said", |_| has_said(&dirs[0], "a host has proved who it is"));
}

#[test]
#[ignore = "needs root: it makes network namespaces; and openssl"]
fn hosts_prove_who_they_are_by_ipv6_as_well() {
    let (names, proofs) = (two_hosts(), certificates());
    let start = |on: &Namespace, n, vm| {
        let dir = Dir::new();
        let config = configure(&dir, n, &proof(&dir, &proofs, "ca", n), &[(vm, n, "")]);
        let text = std::fs::read_to_string(&config).unwrap();
        std::fs::write(&config, text.replace("192.0.2.", "fd02::")).unwrap();
        let host = on.start(&dir, &config);
        (dir, host)
    };
    let (one_dir, one) = start(&names.0, 1, "a");
    let (two_dir, two) = start(&names.1, 2, "b");
    let (mut a, mut b) = (boot(&one_dir, "a"), boot(&two_dir, "b"));
    listen(&mut b, SERVER);
    let (at_a, at_b) = connect(&mut a, &mut b, SERVER);
    let sent = bytes(4, 300_000);
    a.write(at_a, &sent);
    until(&mut [&mut a, &mut b], "bytes", |g| g[1].socket(at_b).got.len() == sent.len());
    assert!(b.socket(at_b).got == sent);
    assert_eq!((fabric(&one).unproven, fabric(&two).unproven), (0, 0));
}

#[test]
#[ignore = "needs root: it makes network namespaces; and openssl"]
fn guests_of_hosts_that_do_not_believe_each_other_use_guest_tcp() {
    for (of_one, of_two) in [("ca", "other"), ("other", "ca"), ("ca", ""), ("", "ca")] {
        let shows = |ca| Some(ca).filter(|ca: &&str| !ca.is_empty());
        let World { mut a, one, two, dirs, b: _b, .. } = world(shows(of_one), shows(of_two));
        is_native(&mut a, SERVER);
        until(&mut [], "it is counted", |_| fabric(&one).unproven + fabric(&two).unproven > 0);
        assert_eq!(fabric(&two).streams, 0);
        let said = |dir: &Dir| {
            ["no tickets from a host", "did not prove who it is", "does not show"]
                .iter()
                .any(|what| has_said(dir, what))
        };
        until(&mut [], "it is said", |_| said(&dirs[0]) || said(&dirs[1]));
    }
}

#[test]
#[ignore = "needs root: it makes network namespaces; and openssl"]
fn certificates_that_are_renewed_hold_at_once_and_streams_go_on() {
    let World { mut a, mut b, one, dirs, proofs, two: _two, .. } = world(Some("ca"), Some("ca"));
    let (at_a, at_b) = connect(&mut a, &mut b, SERVER);
    let sent = bytes(3, 3_000_000);
    b.reads(at_b, false);
    a.write(at_a, &sent);
    show(&dirs[1], &proofs, "other", 2);
    until(&mut [&mut a, &mut b], "the second host has seen it", |_| {
        has_said(&dirs[1], "certificates have changed")
    });
    b.reads(at_b, true);
    until(&mut [&mut a, &mut b], "what flows goes on", |g| {
        g[1].socket(at_b).got.len() == sent.len()
    });
    assert!(b.socket(at_b).got == sent);
    // Its earlier tickets are invalid, and the first one's CA does not hold there.
    is_native(&mut a, SERVER);
    show(&dirs[0], &proofs, "other", 1);
    // A host that was not reached is left alone for a while.
    let mut open = at_a;
    until(&mut [&mut a, &mut b], "they believe each other again", |g| {
        let Ok(at) = try_connect(g[0], SERVER) else { return false };
        let [a, b] = g else { panic!("two") };
        until(&mut [a, b], "yes or no", |g| g[0].socket(at).is_open || g[0].socket(at).is_reset);
        open = at;
        a.socket(at).is_open
    });
    a.write(open, b"again");
    until(&mut [&mut a, &mut b], "bytes", |g| g[1].sockets.values().any(|it| it.got == b"again"));
    a.write(at_a, b"!");
    until(&mut [&mut a, &mut b], "bytes", |g| g[1].socket(at_b).got.len() == sent.len() + 1);
    assert_eq!(fabric(&one).lost, 1, "the one that went by guest TCP");
}

/// A host of the test that speaks TLS as host `n` of a CA would, or without a certificate.
pub(crate) struct Hosts<'a>(pub(crate) &'a Dir);

impl Hosts<'_> {
    fn roots(&self) -> RootCertStore {
        let mut roots = RootCertStore::empty();
        roots.add(CertificateDer::from_pem_file(self.0.join("ca.pem")).unwrap()).unwrap();
        roots
    }

    fn own(&self, name: &str) -> (Vec<CertificateDer<'static>>, PrivateKeyDer<'static>) {
        let chain = CertificateDer::from_pem_file(self.0.join(&format!("{name}.pem"))).unwrap();
        (vec![chain], PrivateKeyDer::from_pem_file(self.0.join(&format!("{name}.key"))).unwrap())
    }

    pub(crate) fn client(
        &self,
        name: Option<&str>,
        protocol: &[u8],
        tcp: TcpStream,
    ) -> StreamOwned<ClientConnection, TcpStream> {
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let config = ClientConfig::builder_with_provider(provider);
        let config = config.with_safe_default_protocol_versions().unwrap();
        let config = config.with_root_certificates(self.roots());
        let mut config = match name.map(|name| self.own(name)) {
            None => config.with_no_client_auth(),
            Some((chain, key)) => config.with_client_auth_cert(chain, key).unwrap(),
        };
        config.alpn_protocols = vec![protocol.to_vec()];
        let address: IpAddr = [192, 0, 2, 2].into();
        let tls = ClientConnection::new(Arc::new(config), ServerName::from(address)).unwrap();
        StreamOwned::new(tls, tcp)
    }

    pub(crate) fn server(
        &self,
        name: &str,
        protocol: &[u8],
        tcp: TcpStream,
    ) -> StreamOwned<ServerConnection, TcpStream> {
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let roots = Arc::new(self.roots());
        let all = WebPkiClientVerifier::builder_with_provider(roots, Arc::clone(&provider));
        let config = ServerConfig::builder_with_provider(provider);
        let config = config.with_safe_default_protocol_versions().unwrap();
        let config = config.with_client_cert_verifier(all.build().unwrap());
        let (chain, key) = self.own(name);
        let mut config = config.with_single_cert(chain, key).unwrap();
        config.alpn_protocols = vec![protocol.to_vec()];
        tcp.set_read_timeout(Some(LIMIT)).unwrap();
        StreamOwned::new(ServerConnection::new(Arc::new(config)).unwrap(), tcp)
    }
}

/// Both halves of each ticket.
fn tickets(bytes: &[u8]) -> Vec<[[u8; 32]; 2]> {
    let halves = bytes.as_chunks::<32>().0;
    halves.as_chunks::<2>().0.to_vec()
}

#[test]
#[ignore = "needs root: it makes network namespaces; and openssl"]
fn who_does_not_prove_who_it_is_gets_no_ticket() {
    let (names, proofs) = (two_hosts(), certificates());
    let (dir, two) = start(&names.1, 2, "b", Some((&proofs, "ca")));
    let _b = boot(&dir, "b");
    let hosts = Hosts(&proofs);
    let cases = [
        (None, PROTOCOL, "peer sent no certificates"),
        (Some("other-1"), PROTOCOL, "invalid peer certificate"),
        (Some("ca-3"), PROTOCOL, "its certificate is not for its address"),
        (Some("ca-1"), b"h2", "peer doesn't support any known protocol"),
    ];
    for (n, (name, protocol, why)) in (1..).zip(cases) {
        let tcp = Stranger::at(&names.0, 1, PROOF_PORT).0;
        let mut stream = hosts.client(name, protocol, tcp);
        let mut told = Vec::new();
        let _ = stream.write_all(&[9]).and_then(|()| stream.read_to_end(&mut told));
        assert_eq!(told, b"", "{why}");
        until(&mut [], why, |_| fabric(&two).unproven == n);
        // Each is another day's news, but this is the same minute.
        until(&mut [], why, |_| n > 1 || has_said(&dir, why));
    }
    // Bytes that are not TLS; a host without guests there; a silent one.
    Stranger::at(&names.0, 1, PROOF_PORT).says(&[0; 64]).is_hung_up_on();
    names.0.ip("addr add 192.0.2.4/24 dev v0");
    Stranger::at(&names.0, 4, PROOF_PORT).is_hung_up_on();
    Stranger::at(&names.0, 1, PROOF_PORT).is_hung_up_on();
    until(&mut [], "all are counted", |_| fabric(&two).unproven == 7);
    // A client that asks for nothing is no host either, and a host gets as many as it asks for.
    let mut stream = hosts.client(Some("ca-1"), PROTOCOL, Stranger::at(&names.0, 1, PROOF_PORT).0);
    stream.write_all(&[0]).unwrap();
    assert!(!matches!(stream.read(&mut [0; 64]), Ok(1..)));
    let mut stream = hosts.client(Some("ca-1"), PROTOCOL, Stranger::at(&names.0, 1, PROOF_PORT).0);
    for many in [1, 255, 7] {
        stream.write_all(&[many]).unwrap();
        stream.read_exact(&mut vec![0; usize::from(many) * 64]).unwrap();
    }
    assert_eq!(fabric(&two).unproven, 7);
}

#[test]
#[ignore = "needs root: it makes network namespaces; and openssl"]
fn a_ticket_is_good_for_one_stream_of_the_host_that_was_told_it() {
    let (names, proofs) = (two_hosts(), certificates());
    let (dir, two) = start(&names.1, 2, "b", Some((&proofs, "ca")));
    let mut b = boot(&dir, "b");
    listen(&mut b, SERVER);
    let hosts = Hosts(&proofs);
    let asks = |many: u8| {
        let tcp = Stranger::at(&names.0, 1, PROOF_PORT).0;
        let mut stream = hosts.client(Some("ca-1"), PROTOCOL, tcp);
        stream.write_all(&[many]).unwrap();
        let mut told = vec![0; usize::from(many) * 64];
        stream.read_exact(&mut told).unwrap();
        (stream, tickets(&told))
    };
    let (control, told) = asks(4);
    let stranger = |on: &Namespace, from| Stranger::at(on, from, PORT);
    let meets = |half: &[u8; 32], answer: &[u8; 32]| {
        let mut it = stranger(&names.0, 1);
        let mut hello = [0; 40];
        it.shows(half).0.read_exact(&mut hello).unwrap();
        assert_eq!(&hello[8..], answer);
        it
    };
    let mut one = meets(&told[0][0], &told[0][1]);
    one.asks(1, "10.0.0.1:5", SERVER);
    until(&mut [&mut b], "a connection", |g| {
        g[0].sockets.values().filter(|it| it.is_open).count() == 2
    });
    assert!(matches!(one.hears(), Kind::Established { .. }));
    // Once more; none that was told, or the other half; another host's. (Some in one byte alone.)
    let mut wrong = told[1][0];
    wrong[31] ^= 1;
    for half in [&told[0][0], &[0; 32], &[7; 32], &told[1][1], &wrong] {
        stranger(&names.0, 1).shows(half).is_hung_up_on();
    }
    stranger(&names.1, 3).shows(&told[1][0]).is_hung_up_on();
    assert_eq!(fabric(&two).unproven, 6);
    let said = "does not show in a stream what it was told";
    until(&mut [], said, |_| has_said(&dir, said));
    // It may still be used by who was told, and speaks for no others for all that.
    let mut other = meets(&told[1][0], &told[1][1]);
    assert_eq!(other.asks(2, "10.0.0.9:5", SERVER).hears(), Kind::Reset(Errno::NotByToe));
    // When the connection ends on which it was told, it is good for nothing; streams go on.
    drop(control);
    let (control, anew) = asks(1);
    stranger(&names.0, 1).shows(&told[2][0]).is_hung_up_on();
    meets(&anew[0][0], &anew[0][1]);
    // The next one of the same host takes the place of the one before.
    let (_next, next) = asks(1);
    stranger(&names.0, 1).shows(&anew[0][0]).is_hung_up_on();
    meets(&next[0][0], &next[0][1]);
    drop(control);
    let data = message(1, Kind::Data { offset: 0, len: 3 }).emit();
    one.says(&data).says(b"abc");
    until(&mut [&mut b], "bytes", |g| g[0].sockets.values().any(|it| it.got == b"abc"));
}

#[test]
#[ignore = "needs root: it makes network namespaces; and openssl"]
fn a_host_that_is_connected_to_proves_who_it_is_as_well() {
    let (names, proofs) = (two_hosts(), certificates());
    let hosts = Hosts(&proofs);
    let listen = |port| names.1.enter(|| TcpListener::bind(("192.0.2.3", port)).unwrap());
    let (door, streams) = (listen(PROOF_PORT), listen(PORT));
    // Another host's certificate, another CA's, no TLS, silence, too many tickets, a wrong answer.
    for case in ["ca-2", "other-3", "", "-", "ca-3+", "ca-3"] {
        let (dir, one) = start(&names.0, 1, "a", Some((&proofs, "ca")));
        let mut a = boot(&dir, "a");
        thread::scope(|scope| {
            let it = scope.spawn(|| {
                let (mut tcp, _) = door.accept().unwrap();
                match case {
                    "" => drop(tcp.write_all(b"HTTP/1.1 200 OK\r\n\r\n")),
                    "-" => drop(tcp.read_to_end(&mut Vec::new())),
                    _ => {
                        let mut stream = hosts.server(case.trim_end_matches('+'), PROTOCOL, tcp);
                        let mut many = [0];
                        if stream.read_exact(&mut many).is_err() {
                            return;
                        }
                        let extra = usize::from(case.ends_with('+'));
                        let told = vec![5; (usize::from(many[0]) + extra) * 64];
                        stream.write_all(&told).unwrap();
                        if extra == 0 {
                            let (tcp, _) = streams.accept().unwrap();
                            let mut it = Stranger(tcp);
                            it.0.read_exact(&mut [0; 40]).unwrap();
                            it.shows(&[6; 32]).is_hung_up_on();
                        }
                    }
                }
            });
            is_native(&mut a, "10.0.0.9:80");
            drop(it.join());
        });
        until(&mut [], case, |_| fabric(&one).unproven == 1);
        let said = if case == "ca-3" { "does not show" } else { "no tickets from a host" };
        until(&mut [], case, |_| has_said(&dir, said));
    }
}

#[test]
#[ignore = "needs openssl"]
fn what_is_wrong_with_files_is_said_before_the_daemon_runs() {
    let (dir, proofs) = (Dir::new(), certificates());
    let says = |toe: &str| {
        let config = configure(&dir, 1, toe, &[("a", 1, "")]);
        let output = run(&["--config", config.to_str().unwrap(), "--check"]);
        (output.status.success(), format!("{output:?}"))
    };
    let keys = proof(&dir, &proofs, "ca", 1);
    let (_, said) = says(&keys);
    assert!(!said.contains("toe: "), "{said}");
    proof(&dir, &proofs, "ca", 2);
    let (is_fine, said) = says(&keys);
    assert!(!is_fine && said.contains("the certificate is not for 192.0.2.1"), "{said}");
    std::fs::copy(proofs.join("ca-1.pem"), dir.join("own.pem")).unwrap();
    let (is_fine, said) = says(&keys);
    assert!(!is_fine && said.contains("own.pem"), "the key of another: {said}");
    std::fs::write(dir.join("ca.pem"), "").unwrap();
    let (is_fine, said) = says(&keys);
    assert!(!is_fine && said.contains("ca.pem: has no certificate"), "{said}");
}
