//! The identity of a host, for encrypted streams: certificates of one CA, each for the overlay
//! addresses of its host.

use std::net::IpAddr;
use std::sync::Arc;

use nightporter_registry::tls::{Files, Own, Tls, TlsError};
use rustls::client::{Resumption, verify_server_name};
use rustls::pki_types::{CertificateDer, ServerName};
use rustls::server::{ParsedCertificate, WebPkiClientVerifier};
use rustls::version::TLS13;
use rustls::{ClientConfig, ServerConfig};

use super::Config;
use crate::errors::{StartError, error};
use crate::limits::{PROOF_CHAIN_BYTES_MAX, PROOF_CHAIN_MAX};

/// The protocol over TLS, by which a stream differs from all else that a certificate may be for.
pub(crate) const PROTOCOL: &[u8] = b"nightporter-toe-stream/1";

/// The identity that this host shows, and the authority that it believes.
#[derive(Debug)]
pub(crate) struct Proof {
    pub(crate) client: Arc<ClientConfig>,
    pub(crate) server: Arc<ServerConfig>,
    own: CertificateDer<'static>,
}

impl Proof {
    /// Reads it.
    ///
    /// # Errors
    /// The first file that is wrong.
    pub(crate) fn read(files: &Files) -> Result<Self, TlsError> {
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let roots = Arc::new(files.read_ca()?);
        let wrong = |e: rustls::Error| files.own_is_wrong(&e);
        let own = files.read_own()?.ok_or_else(|| files.own_is_wrong(&"no certificate"))?;
        let Own { chain, key } = own;
        let first = chain.first().cloned().ok_or_else(|| files.own_is_wrong(&"is empty"))?;
        if is_too_long(&chain) {
            let most =
                format!("{PROOF_CHAIN_MAX} certificates or {} KiB", PROOF_CHAIN_BYTES_MAX >> 10);
            return Err(files.own_is_wrong(&format!("has more than {most}")));
        }
        let verifier =
            WebPkiClientVerifier::builder_with_provider(Arc::clone(&roots), Arc::clone(&provider));
        let verifier = verifier.build().map_err(|e| files.own_is_wrong(&e))?;
        let mut server = ServerConfig::builder_with_provider(Arc::clone(&provider))
            .with_protocol_versions(&[&TLS13])
            .map_err(wrong)?
            .with_client_cert_verifier(verifier)
            .with_single_cert(chain.clone(), key.clone_key())
            .map_err(wrong)?;
        let mut client = ClientConfig::builder_with_provider(provider)
            .with_protocol_versions(&[&TLS13])
            .map_err(wrong)?
            .with_root_certificates(roots)
            .with_client_auth_cert(chain, key)
            .map_err(wrong)?;
        // Each connection is proved anew, by the certificates of now.
        server.send_tls13_tickets = 0;
        client.resumption = Resumption::disabled();
        server.alpn_protocols = vec![PROTOCOL.to_vec()];
        client.alpn_protocols = vec![PROTOCOL.to_vec()];
        Ok(Self { client: Arc::new(client), server: Arc::new(server), own: first })
    }

    /// Whether what this host shows is for this address.
    pub(crate) fn is_of(&self, address: IpAddr) -> bool {
        is_of(&self.own, address)
    }
}

/// Whether a certificate is for this address.
pub(crate) fn is_of(certificate: &CertificateDer<'_>, address: IpAddr) -> bool {
    let name = ServerName::from(address);
    ParsedCertificate::try_from(certificate).is_ok_and(|it| verify_server_name(&it, &name).is_ok())
}

/// Whether a host shows more certificates than others accept.
pub(crate) fn is_too_long(chain: &[CertificateDer<'_>]) -> bool {
    chain.len() > PROOF_CHAIN_MAX
        || chain.iter().map(|it| it.len()).sum::<usize>() > PROOF_CHAIN_BYTES_MAX
}

/// Reads the files with which this host proves its identity, if there are any.
pub(crate) fn proof_of(config: &Config) -> Result<Option<Tls<Proof>>, StartError> {
    let Some(files) = config.toe.as_ref().and_then(|toe| toe.encrypt.clone()) else {
        return Ok(None);
    };
    let fix = "give PEM files that the daemon can read; docs/configuration.md says what hosts show";
    let proof = Tls::of(files, Proof::read).map_err(|e| error(format!("toe: {e}"), fix))?;
    for overlay in &config.overlays {
        let address = overlay.local.ip();
        if !proof.config().is_of(address) {
            let fix = "give a certificate with a subjectAltName of IP:ADDRESS for each overlay";
            let what =
                format!("toe: the certificate is not for {address}, where {} is", overlay.name);
            return Err(error(what, fix));
        }
    }
    Ok(Some(proof))
}
