//! The files that a registry is reached with.

use nightporter_registry::etcd;

use super::RegistryConfig;
use crate::errors::{StartError, error};

/// How to speak TLS, and a name with its password.
type Secrets = (Option<etcd::Tls>, Option<(String, String)>);

/// Reads the files of a registry.
pub(crate) fn registry_files(registry: &RegistryConfig) -> Result<Secrets, StartError> {
    let says_tls = registry.etcd.iter().any(|member| member.is_tls);
    let fix = "give PEM files that the daemon can read";
    let own = registry.certificate.clone().zip(registry.key.clone());
    let files = etcd::Files { ca: registry.ca.clone(), own };
    let tls = says_tls.then(|| etcd::Tls::new(files)).transpose();
    let tls = tls.map_err(|e| error(format!("registry: {e}"), fix))?;
    let user = match (&registry.user, &registry.password_file) {
        (Some(user), Some(path)) => {
            let password = std::fs::read_to_string(path).map_err(|e| {
                let what = format!("registry: {}: {e}", path.display());
                error(what, "give a file that the daemon can read, with the password in it")
            })?;
            Some((user.clone(), password.trim_end_matches('\n').to_owned()))
        }
        _ => None,
    };
    Ok((tls, user))
}
