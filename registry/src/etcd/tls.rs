//! Certificates and keys, out of files, which somebody renews.

use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use rustls::{ClientConfig, RootCertStore};

/// Files in PEM.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct Files {
    /// Who vouches for members.
    pub ca: PathBuf,
    /// A certificate of this host, and its key.
    pub own: Option<(PathBuf, PathBuf)>,
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

impl Files {
    fn stamps(&self) -> Vec<Option<Stamp>> {
        let own = self.own.iter().flat_map(|(chain, key)| [chain, key]);
        let stamp = |path: &PathBuf| {
            let file = path.metadata().ok()?;
            Some((file.ino(), file.size(), (file.mtime(), file.mtime_nsec())))
        };
        std::iter::once(&self.ca).chain(own).map(stamp).collect()
    }

    /// Reads them, now.
    ///
    /// # Errors
    /// The first that is wrong.
    pub fn read(&self) -> Result<Arc<ClientConfig>, TlsError> {
        let mut roots = RootCertStore::empty();
        for root in certificates(&self.ca)? {
            roots.add(root).map_err(|e| error(&self.ca, &e))?;
        }
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let config = ClientConfig::builder_with_provider(provider)
            .with_safe_default_protocol_versions()
            .map_err(|e| error(&self.ca, &e))?
            .with_root_certificates(roots);
        let config = match &self.own {
            None => config.with_no_client_auth(),
            Some((chain, key)) => {
                let own = PrivateKeyDer::from_pem_file(key).map_err(|e| error(key, &e))?;
                config
                    .with_client_auth_cert(certificates(chain)?, own)
                    .map_err(|e| error(chain, &e))?
            }
        };
        Ok(Arc::new(config))
    }
}

/// What tells whether a file is another now: its number and size, and when it was written.
type Stamp = (u64, u64, (i64, i64));

/// What was read of files, and is read again when they are others.
#[derive(Clone, Debug)]
pub struct Tls {
    files: Files,
    /// Of each file when it was read last; `None`: it was not there.
    stamps: Vec<Option<Stamp>>,
    config: Arc<ClientConfig>,
}

impl Tls {
    /// Reads them for the first time.
    ///
    /// # Errors
    /// As of [`Files::read`].
    pub fn new(files: Files) -> Result<Self, TlsError> {
        let stamps = files.stamps(); // before, so that a file that changes meanwhile is read again
        Ok(Self { stamps, config: files.read()?, files })
    }

    /// Reads them again if one has changed since; whether it has. Errors: once for each change;
    /// what was read before counts.
    pub(super) fn renew(&mut self) -> Result<bool, TlsError> {
        let stamps = self.files.stamps();
        if stamps == self.stamps {
            return Ok(false);
        }
        self.stamps = stamps;
        self.config = self.files.read()?;
        Ok(true)
    }

    pub(super) fn config(&self) -> &Arc<ClientConfig> {
        &self.config
    }
}

fn certificates(path: &Path) -> Result<Vec<CertificateDer<'static>>, TlsError> {
    let all = CertificateDer::pem_file_iter(path).and_then(Iterator::collect);
    let all: Vec<_> = all.map_err(|e| error(path, &e))?;
    if all.is_empty() { Err(error(path, &"has no certificate")) } else { Ok(all) }
}
