//! The identity of hosts: certificates, a host of the test that shows one, and what is wrong with
//! files. Needs root and openssl.

use std::net::{IpAddr, TcpStream};
use std::path::Path;
use std::process::Command;
use std::sync::Arc;

use nightporter_core::toe::control::Ask;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName};
use rustls::server::WebPkiClientVerifier;
use rustls::{
    ClientConfig, ClientConnection, RootCertStore, ServerConfig, ServerConnection, StreamOwned,
};

use crate::fabric::{PORT, configure, fabric};
use crate::host::{Dir, LIMIT, run};
use crate::overlay::{Namespace, two_hosts};
use crate::sockets::{SocketGuest, ask, connect, listen, try_connect, until};
use crate::toe::{NATIVE, SERVER, boot, bytes};

pub(crate) const PROOF_PORT: u16 = PORT + 1;
pub(crate) const STREAM: &[u8] = b"nightporter-toe-stream/1";

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

/// Streams are encrypted, by certificates of host `n` and its CA in files of its own, which `show`
/// replaces.
pub(crate) fn encrypt(dir: &Dir, from: &Dir, ca: &str, n: u8) -> String {
    show(dir, from, ca, n);
    let [ca, certificate, key] = ["ca.pem", "own.pem", "own.key"].map(|name| dir.join(name));
    let line = |key: &str, path: &Path| format!("{key} = \"{}\"\n", path.display());
    line("ca", &ca) + &line("certificate", &certificate) + &line("key", &key) + "encrypt = true\n"
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

pub(crate) fn has_said(dir: &Dir, what: &str) -> bool {
    std::fs::read_to_string(dir.join("log")).unwrap().contains(what)
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
fn streams_are_encrypted_by_ipv6_as_well() {
    let (names, proofs) = (two_hosts(), certificates());
    let start = |on: &Namespace, n, vm| {
        let dir = Dir::new();
        let config = configure(&dir, n, &encrypt(&dir, &proofs, "ca", n), &[(vm, n, "")]);
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
    let all = [fabric(&one), fabric(&two)].map(|it| (it.streams, it.encrypted, it.unproven));
    assert_eq!(all, [(1, 1, 0); 2]);
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

#[test]
#[ignore = "needs openssl"]
fn what_is_wrong_with_files_is_said_before_the_daemon_runs() {
    let (dir, proofs) = (Dir::new(), certificates());
    let says = |toe: &str| {
        let config = configure(&dir, 1, toe, &[("a", 1, "")]);
        let output = run(&["--config", config.to_str().unwrap(), "--check"]);
        (output.status.success(), format!("{output:?}"))
    };
    let keys = encrypt(&dir, &proofs, "ca", 1);
    let (_, said) = says(&keys);
    assert!(!said.contains("toe: "), "{said}");
    let (is_fine, said) = says(&keys.replace("encrypt = true", ""));
    assert!(!is_fine && said.contains("toe.ca: goes with encrypt = true"), "{said}");
    assert!(said.contains("fix: add encrypt = true, on all hosts; or, if everybody"), "{said}");
    show(&dir, &proofs, "ca", 2);
    let (is_fine, said) = says(&keys);
    assert!(!is_fine && said.contains("the certificate is not for 192.0.2.1"), "{said}");
    std::fs::copy(proofs.join("ca-1.pem"), dir.join("own.pem")).unwrap();
    let (is_fine, said) = says(&keys);
    assert!(!is_fine && said.contains("own.pem"), "the key of another: {said}");
    std::fs::write(dir.join("ca.pem"), "").unwrap();
    let (is_fine, said) = says(&keys);
    assert!(!is_fine && said.contains("ca.pem: has no certificate"), "{said}");
}
