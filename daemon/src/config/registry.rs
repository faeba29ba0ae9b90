//! `[registry]`: where hosts tell each other who is where.

use std::path::{Path, PathBuf};

use nightporter_registry::etcd::Endpoint;
use toml::de::DeValue;

use super::parse::path;
use super::reader::{Section, integer, shown, string};
use super::table::table;

/// Members that are tried in turn, at most.
const MEMBERS_MAX: usize = 16;
/// Longest prefix of keys, in bytes.
const PREFIX_BYTES_MAX: usize = 128;
/// The fix for a wrong path.
const FILE_FIX: &str = "give the absolute path of a file";

table! {
    /// `[registry]`: etcd. Without it there is the list of `[[station]]`.
    RegistryConfig(s) {
        /// Members of the etcd cluster: `"https://192.0.2.10:2379"`, or `http`. They are tried in
        /// turn.
        etcd: Vec<Endpoint> = required(
            members, "list the members' client URLs, as in [\"https://192.0.2.10:2379\"]");
        /// The beginning of all keys: default `/nightporter/`. Hosts with another know nothing of
        /// these.
        prefix: String = default(
            "/nightporter/".into(), prefix,
            "begin and end it with a slash, as in \"/nightporter/\"");
        /// Seconds after which a host that gives no sign of life is gone, and its VMs with it.
        /// Default 10; 2 to 3600. A sign of life costs a request every third of it; a short time
        /// ends the entries of a host that cannot reach etcd for a moment.
        ttl_s: u16 = default(10, integer(2..=3600), "give seconds; 10 is the default");
        /// The authorities for the members' certificates. Default: those whom Debian trusts.
        ca: PathBuf = default("/etc/ssl/certs/ca-certificates.crt".into(), path, FILE_FIX);
        /// A certificate of this host, if members ask for one. With `key`.
        certificate: Option<PathBuf> = optional(path, FILE_FIX);
        /// Its key.
        key: Option<PathBuf> = optional(path, FILE_FIX);
        /// The name of an etcd user. With `password_file`. Default: none.
        user: Option<String> = optional(string, "give the name of an etcd user");
        /// A file with the user's password, and at most a newline behind it.
        password_file: Option<PathBuf> = optional(path, FILE_FIX);
    }
}

impl RegistryConfig {
    /// The parts of TLS, if a member speaks it.
    pub(crate) fn tls_files(&self) -> impl Iterator<Item = &Path> {
        let files = [Some(&self.ca), self.certificate.as_ref(), self.key.as_ref()];
        let says_tls = self.etcd.iter().any(|member| member.is_tls);
        files.into_iter().flatten().filter(move |_| says_tls).map(PathBuf::as_path)
    }
}

pub(super) fn url(member: &Endpoint) -> String {
    format!("{}://{}", if member.is_tls { "https" } else { "http" }, member.address)
}

pub(super) fn read(mut s: Section<'_, '_>) -> RegistryConfig {
    let config = RegistryConfig::read(&mut s);
    if config.certificate.is_some() != config.key.is_some() {
        s.problem("certificate", "needs `key`, and a key a certificate".into(), "give both");
    }
    if config.user.is_some() != config.password_file.is_some() {
        s.problem("user", "needs `password_file`, and a password a user".into(), "give both");
    }
    let is_clear = |member: &Endpoint| !member.is_tls && !member.address.ip().is_loopback();
    if config.user.is_some() && config.etcd.iter().any(is_clear) {
        let what = "would send the password over a connection without encryption".into();
        s.problem("user", what, "use https");
    }
    s.finish();
    config
}

fn members(v: &DeValue<'_>) -> Result<Vec<Endpoint>, String> {
    let list = v.as_array().ok_or_else(|| format!("{} is not a list", shown(v)))?;
    if list.is_empty() || list.len() > MEMBERS_MAX {
        return Err(format!("has {} members, and may have 1 to {MEMBERS_MAX}", list.len()));
    }
    list.iter().map(|v| member(v.get_ref())).collect()
}

fn member(v: &DeValue<'_>) -> Result<Endpoint, String> {
    let text = string(v)?;
    let bad = || format!("{} is not http://ADDRESS:PORT or https://ADDRESS:PORT", shown(v));
    let (scheme, rest) = text.split_once("://").ok_or_else(bad)?;
    let is_tls = match scheme {
        "http" => false,
        "https" => true,
        _ => return Err(bad()),
    };
    let address = rest.trim_end_matches('/').parse().map_err(|_| bad())?;
    Ok(Endpoint { address, is_tls })
}

fn prefix(v: &DeValue<'_>) -> Result<String, String> {
    let text = string(v)?;
    let good = |c: char| c.is_ascii_alphanumeric() || "/-_.".contains(c);
    let is_good = text.starts_with('/') && text.ends_with('/') && text.chars().all(good);
    if is_good && text.len() <= PREFIX_BYTES_MAX {
        return Ok(text);
    }
    Err(format!("{} is not a prefix", shown(v)))
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::super::Config;
    use super::*;

    fn parse(registry: &str) -> Result<RegistryConfig, String> {
        let text = format!("[registry]\n{registry}\n[[vm]]\nname = \"a\"\n");
        let config = Config::parse("np.toml", &text, &BTreeMap::new());
        config.map(|config| config.registry.unwrap()).map_err(|e| e.to_string())
    }

    #[test]
    fn a_registry_needs_members_and_its_keys_say_the_same() {
        let few = parse("etcd = [\"http://127.0.0.1:2379\"]").unwrap();
        assert_eq!(
            (few.ttl_s, few.prefix.as_str(), few.etcd[0].is_tls),
            (10, "/nightporter/", false)
        );
        let all = parse(
            "etcd = [\"https://[fd00::1]:2379\", \"https://192.0.2.9:2379/\"]\nttl_s = 5\n\
             prefix = \"/a/b/\"\nca = \"/ca\"\ncertificate = \"/c\"\nkey = \"/k\"\n\
             user = \"np\"\npassword_file = \"/p\"",
        )
        .unwrap();
        for registry in [few, all] {
            let lines = registry.keys().into_iter();
            let text: Vec<_> = lines.filter_map(|(k, v)| Some(format!("{k} = {}", v?))).collect();
            assert_eq!(parse(&text.join("\n")), Ok(registry));
        }
    }

    #[test]
    fn what_is_wrong_is_said_with_its_line_and_what_to_do() {
        let good = "etcd = [\"http://192.0.2.9:2379\"]";
        for (registry, said) in [
            ("", "registry.etcd: is missing"),
            ("etcd = []", "has 0 members"),
            ("etcd = [\"192.0.2.9:2379\"]", "is not http://ADDRESS:PORT"),
            ("etcd = [\"https://etcd1:2379\"]", "is not http://ADDRESS:PORT"),
            (&format!("{good}\nttl_s = 1"), "registry.ttl_s"),
            (&format!("{good}\nprefix = \"np\""), "\"np\" is not a prefix"),
            (&format!("{good}\nkey = \"/k\""), "needs `key`, and a key a certificate"),
            (&format!("{good}\nuser = \"np\""), "needs `password_file`"),
            (&format!("{good}\nuser = \"np\"\npassword_file = \"/p\""), "without encryption"),
            (&format!("{good}\n[[station]]\n"), "is a list of what a [registry] tells"),
        ] {
            let error = match registry.contains("[[station]]") {
                true => {
                    let station = "vni = 1\nmac = \"52:54:00:00:00:01\"\nhost = \"192.0.2.2\"";
                    parse(&format!("{registry}{station}")).unwrap_err()
                }
                false => parse(registry).unwrap_err(),
            };
            assert!(error.contains(said) && error.contains("fix: "), "{error}");
        }
    }
}
