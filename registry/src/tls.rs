//! Certificates and keys, out of files, which somebody renews.

use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use rustls::pki_types::pem::{self, PemObject};
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use rustls::{ClientConfig, RootCertStore};

/// Files in PEM.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct Files {
    /// Who vouches for others.
    pub ca: PathBuf,
    /// A certificate of this host, and its key.
    pub own: Option<(PathBuf, PathBuf)>,
}

/// A certificate, those between it and who vouches for it, and its key.
#[derive(Debug)]
pub struct Own {
    /// Its own first.
    pub chain: Vec<CertificateDer<'static>>,
    /// Of the first.
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

/// Without what is in the file, which may be a key.
fn words(e: &pem::Error) -> String {
    match e {
        pem::Error::IllegalSectionStart { .. } => "the beginning of a section is damaged".into(),
        pem::Error::MissingSectionEnd { .. } => "the end of a section is missing".into(),
        e => e.to_string(),
    }
}

impl Files {
    /// All of them.
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

    /// Who vouches for others.
    ///
    /// # Errors
    /// The file is wrong.
    pub fn read_ca(&self) -> Result<RootCertStore, TlsError> {
        let mut roots = RootCertStore::empty();
        for root in certificates(&self.ca)? {
            roots.add(root).map_err(|e| error(&self.ca, &e))?;
        }
        Ok(roots)
    }

    /// What this host shows, if anything.
    ///
    /// # Errors
    /// The first file that is wrong.
    pub fn read_own(&self) -> Result<Option<Own>, TlsError> {
        let Some((chain, key)) = &self.own else { return Ok(None) };
        let key = PrivateKeyDer::from_pem_file(key).map_err(|e| error(key, &words(&e)))?;
        Ok(Some(Own { chain: certificates(chain)?, key }))
    }

    /// What is wrong with what this host shows.
    #[must_use]
    pub fn own_is_wrong(&self, what: &dyn std::fmt::Display) -> TlsError {
        error(self.own.as_ref().map_or(&self.ca, |(chain, _)| chain), what)
    }

    /// How to speak to servers.
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

/// What tells whether a file is another now: its number and size, and when it was written.
type Stamp = (u64, u64, (i64, i64));

/// What was made of files, and is made again when they are others: how to speak to servers, or what
/// else `C` is.
#[derive(Clone, Debug)]
pub struct Tls<C = Arc<ClientConfig>> {
    files: Files,
    /// Of each file when it was read last; `None`: it was not there.
    stamps: Vec<Option<Stamp>>,
    config: C,
    read: fn(&Files) -> Result<C, TlsError>,
}

impl Tls {
    /// Reads them for the first time.
    ///
    /// # Errors
    /// The first that is wrong.
    pub fn new(files: Files) -> Result<Self, TlsError> {
        Self::of(files, Files::client)
    }
}

impl<C> Tls<C> {
    /// Reads them for the first time, by this function.
    ///
    /// # Errors
    /// The function's.
    pub fn of(files: Files, read: fn(&Files) -> Result<C, TlsError>) -> Result<Self, TlsError> {
        let stamps = files.stamps(); // before, so that a file that changes meanwhile is read again
        Ok(Self { stamps, config: read(&files)?, files, read })
    }

    /// Reads them again if one has changed since; whether it has.
    ///
    /// # Errors
    /// As the first time, once for each change; what was read before counts.
    pub fn renew(&mut self) -> Result<bool, TlsError> {
        let stamps = self.files.stamps();
        if stamps == self.stamps {
            return Ok(false);
        }
        self.stamps = stamps;
        self.config = (self.read)(&self.files)?;
        Ok(true)
    }

    /// What was made of them last.
    pub const fn config(&self) -> &C {
        &self.config
    }
}

fn certificates(path: &Path) -> Result<Vec<CertificateDer<'static>>, TlsError> {
    let all = CertificateDer::pem_file_iter(path).and_then(Iterator::collect);
    let all: Vec<_> = all.map_err(|e| error(path, &words(&e)))?;
    if all.is_empty() { Err(error(path, &"has no certificate")) } else { Ok(all) }
}
