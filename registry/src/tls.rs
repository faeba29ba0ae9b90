//! Certificates and keys from files, which are read again when they are renewed.

use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use rustls::pki_types::pem::{self, PemObject};
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use rustls::{ClientConfig, RootCertStore};

/// Files in PEM.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct Files {
    /// Certificates of the CAs that peers must have.
    pub ca: PathBuf,
    /// A certificate of this host, and its key.
    pub own: Option<(PathBuf, PathBuf)>,
}

/// A certificate, its intermediate certificates and its key.
#[derive(Debug)]
pub struct Own {
    /// The own certificate comes first.
    pub chain: Vec<CertificateDer<'static>>,
    /// Key of the first certificate.
    pub key: PrivateKeyDer<'static>,
}

/// A file that is not what it should be.
#[derive(Debug, thiserror::Error)]
#[error("{}: {what}", path.display())]
pub struct TlsError {
    path: PathBuf,
    what: String,
}

fn error(path: &Path, what: &dyn std::fmt::Display) -> TlsError {
    TlsError { path: path.into(), what: what.to_string() }
}

/// The error without the file's content, which may be a key.
fn words(e: &pem::Error) -> String {
    match e {
        pem::Error::IllegalSectionStart { .. } => "the beginning of a section is damaged".into(),
        pem::Error::MissingSectionEnd { .. } => "the end of a section is missing".into(),
        e => e.to_string(),
    }
}

impl Files {
    /// All files.
    pub fn all(&self) -> impl Iterator<Item = &PathBuf> {
        let own = self.own.iter().flat_map(|(chain, key)| [chain, key]);
        std::iter::once(&self.ca).chain(own)
    }

    fn stamps(&self) -> Vec<Option<Stamp>> {
        let stamp = |path: &PathBuf| {
            let file = path.metadata().ok()?;
            Some((file.ino(), file.size(), (file.mtime(), file.mtime_nsec())))
        };
        self.all().map(stamp).collect()
    }

    /// Certificates of the CAs that peers must have.
    ///
    /// # Errors
    /// The file cannot be used.
    pub fn read_ca(&self) -> Result<RootCertStore, TlsError> {
        let mut roots = RootCertStore::empty();
        for root in certificates(&self.ca)? {
            roots.add(root).map_err(|e| error(&self.ca, &e))?;
        }
        Ok(roots)
    }

    /// The certificate of this host, if it has one.
    ///
    /// # Errors
    /// The first file that cannot be used.
    pub fn read_own(&self) -> Result<Option<Own>, TlsError> {
        let Some((chain, key)) = &self.own else { return Ok(None) };
        let key = PrivateKeyDer::from_pem_file(key).map_err(|e| error(key, &words(&e)))?;
        Ok(Some(Own { chain: certificates(chain)?, key }))
    }

    /// The reason why this host's certificate cannot be used.
    #[must_use]
    pub fn own_is_wrong(&self, what: &dyn std::fmt::Display) -> TlsError {
        error(self.own.as_ref().map_or(&self.ca, |(chain, _)| chain), what)
    }

    /// The configuration of a TLS client.
    fn client(&self) -> Result<Arc<ClientConfig>, TlsError> {
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let config = ClientConfig::builder_with_provider(provider)
            .with_safe_default_protocol_versions()
            .map_err(|e| error(&self.ca, &e))?
            .with_root_certificates(self.read_ca()?);
        Ok(Arc::new(match self.read_own()? {
            None => config.with_no_client_auth(),
            Some(Own { chain, key }) => {
                let config = config.with_client_auth_cert(chain, key);
                config.map_err(|e| self.own_is_wrong(&e))?
            }
        }))
    }
}

/// A file's identity: inode, size, time of its last change.
type Stamp = (u64, u64, (i64, i64));

/// A value `C` made from files (a TLS configuration), which is made again when the files change.
#[derive(Clone, Debug)]
pub struct Tls<C = Arc<ClientConfig>> {
    files: Files,
    /// Of each file when it was last read; `None`: the file was missing.
    stamps: Vec<Option<Stamp>>,
    config: C,
    read: fn(&Files) -> Result<C, TlsError>,
}

impl Tls {
    /// Reads the files for the first time.
    ///
    /// # Errors
    /// The first file that cannot be used.
    pub fn new(files: Files) -> Result<Self, TlsError> {
        Self::of(files, Files::client)
    }
}

impl<C> Tls<C> {
    /// Reads the files for the first time, by the function `read`.
    ///
    /// # Errors
    /// Those of `read`.
    pub fn of(files: Files, read: fn(&Files) -> Result<C, TlsError>) -> Result<Self, TlsError> {
        let stamps = files.stamps(); // before, so that a file that changes meanwhile is read again
        Ok(Self { stamps, config: read(&files)?, files, read })
    }

    /// Reads the files again if one has changed; returns whether one has.
    ///
    /// # Errors
    /// As for the first time, once for each change; the earlier value stays.
    pub fn renew(&mut self) -> Result<bool, TlsError> {
        let stamps = self.files.stamps();
        if stamps == self.stamps {
            return Ok(false);
        }
        self.stamps = stamps;
        self.config = (self.read)(&self.files)?;
        Ok(true)
    }

    /// The last value that was made of the files.
    pub const fn config(&self) -> &C {
        &self.config
    }
}

fn certificates(path: &Path) -> Result<Vec<CertificateDer<'static>>, TlsError> {
    let all = CertificateDer::pem_file_iter(path).and_then(Iterator::collect);
    let all: Vec<_> = all.map_err(|e| error(path, &words(&e)))?;
    if all.is_empty() { Err(error(path, &"has no certificate")) } else { Ok(all) }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn text(files: &Files) -> Result<String, TlsError> {
        std::fs::read_to_string(&files.ca).map_err(|e| error(&files.ca, &e))
    }

    #[test]
    fn a_file_that_changes_is_read_again_and_one_that_is_gone_changes_nothing() {
        let ca = std::env::temp_dir().join(format!("np-tls-{}", std::process::id()));
        std::fs::write(&ca, "1").unwrap();
        let mut tls = Tls::of(Files { ca: ca.clone(), own: None }, text).unwrap();
        assert!(!tls.renew().unwrap());
        std::fs::write(&ca, "22").unwrap();
        assert!(tls.renew().unwrap());
        assert!(!tls.renew().unwrap());
        assert_eq!(tls.config(), "22");
        std::fs::remove_file(&ca).unwrap();
        let e = tls.renew().unwrap_err();
        assert!(e.to_string().starts_with(&format!("{}: ", ca.display())), "{e}");
        assert!(!tls.renew().unwrap(), "it is said once");
        assert_eq!(tls.config(), "22");
    }

    #[test]
    fn a_damaged_file_is_named_with_what_is_wrong_and_without_its_content() {
        let ca = std::env::temp_dir().join(format!("np-pem-{}", std::process::id()));
        std::fs::write(&ca, "-----BEGIN CERTIFICATE-----\nc2VjcmV0\n").unwrap();
        let files = Files { ca: ca.clone(), own: None };
        let error = files.read_ca().unwrap_err().to_string();
        assert_eq!(error, format!("{}: the end of a section is missing", ca.display()));
        std::fs::remove_file(&ca).unwrap();
    }
}
