//! Input from other hosts, and from files, before this host believes anybody: parts of the keeper,
//! alone.

use std::net::IpAddr;
use std::os::fd::OwnedFd;

use nightporter_registry::tls::{Files, TlsError};
use rustls::Connection;
use rustls::pki_types::CertificateDer;

use super::conn::Conn;
use crate::config::proof::{self, Proof};

/// Whether a certificate (DER) is for this address.
#[must_use]
pub fn is_certificate_of(der: &[u8], address: IpAddr) -> bool {
    proof::is_of(&CertificateDer::from(der), address)
}

/// Whether these files prove that this host is at `address`.
///
/// # Errors
/// The first that is wrong.
pub fn files_prove(files: &Files, address: IpAddr) -> Result<bool, TlsError> {
    Ok(Proof::read(files)?.is_of(address))
}

/// A connection on which another host is to show who it is.
#[derive(Debug)]
pub struct Stranger(Conn);

impl Stranger {
    /// Over a socket that does not block.
    #[must_use]
    pub fn new(socket: OwnedFd, tls: Connection) -> Self {
        Self(Conn::new(socket, tls))
    }

    /// Reads what there is, once. Returns whether it has shown all.
    ///
    /// # Errors
    /// The connection's end, and why.
    pub fn turn(&mut self) -> Result<bool, String> {
        self.0.turn()?;
        Ok(self.0.is_open())
    }
}
