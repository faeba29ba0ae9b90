//! `[toe]`: guests' sockets on other hosts.

use std::path::{Path, PathBuf};

use nightporter_registry::tls::Files;
use toml::de::DeValue;

use super::keys::{Keys, plain, quoted};
use super::parse::path;
use super::reader::{Section, boolean, integer, string};
use super::table::Shown as _;

/// The daemon is built with UCX.
const HAS_UCX: bool = cfg!(feature = "ucx");

/// The port at which hosts connect to each other, unless configured otherwise.
const PORT: u16 = 4793;

/// The way of payload between hosts.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub enum FabricKind {
    /// The streams of TCP that there are anyway.
    #[default]
    Tcp,
    /// UCX, to hosts that have it too: of daemons that are built with the feature `ucx`.
    Ucx,
}

impl FabricKind {
    const fn name(self) -> &'static str {
        match self {
            Self::Tcp => "tcp",
            Self::Ucx => "ucx",
        }
    }
}

fn fabric(v: &DeValue<'_>) -> Result<FabricKind, String> {
    match &string(v)?[..] {
        "tcp" => Ok(FabricKind::Tcp),
        "ucx" if HAS_UCX => Ok(FabricKind::Ucx),
        "ucx" => {
            Err("is not in this nightporterd, which is built without the feature `ucx`".into())
        }
        other => Err(format!("\"{other}\" is neither \"tcp\" nor \"ucx\"")),
    }
}

/// `[toe]`: the virtual TOE between hosts. Without it sockets go to guests of this host alone.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct ToeConfig {
    /// The TCP port that all hosts listen at, at their overlays' addresses. Default 4793.
    pub port: u16,
    /// `fabric`: the way of payload to other hosts. Default `tcp`.
    pub fabric: FabricKind,
    /// `encrypt`: streams go by TLS at the next port, and none by plain TCP; hosts prove their
    /// identity with `ca`, `certificate` and `key`. Default: none; hosts are known by their
    /// addresses alone, and the network between them has to be trusted.
    pub encrypt: Option<Files>,
}

impl ToeConfig {
    /// Whether payload should go by UCX.
    #[must_use]
    pub fn has_ucx(&self) -> bool {
        self.fabric == FabricKind::Ucx
    }

    /// The TCP port to which this host's streams go: the next one, if they are encrypted.
    #[must_use]
    pub const fn dialed_port(&self) -> u16 {
        self.port.saturating_add(self.encrypt.is_some() as u16)
    }

    /// The files with which this host proves its identity.
    pub(crate) fn proof_files(&self) -> impl Iterator<Item = &Path> {
        self.encrypt.iter().flat_map(Files::all).map(PathBuf::as_path)
    }

    /// All keys of `[toe]`.
    #[must_use]
    pub fn keys(&self) -> Keys {
        let files = self.encrypt.as_ref();
        let own = files.and_then(|files| files.own.as_ref());
        vec![
            ("port", plain(self.port)),
            ("fabric", Some(quoted(self.fabric.name()))),
            ("ca", files.and_then(|files| files.ca.shown())),
            ("certificate", own.and_then(|(certificate, _)| certificate.shown())),
            ("key", own.and_then(|(_, key)| key.shown())),
            ("encrypt", plain(self.encrypt.is_some())),
        ]
    }
}

pub(super) fn read(mut s: Section<'_, '_>, has_overlays: bool) -> ToeConfig {
    let port = s.get("port", "give a TCP port; 4793 is the default", integer(1..=65535));
    if !has_overlays {
        let what = "needs an [[overlay]]: sockets reach the hosts that its frames reach".into();
        s.problem("port", what, "add the overlay that both hosts' VMs are on, or remove [toe]");
    }
    let port = port.unwrap_or(PORT);
    let fix = "give \"tcp\", the default, or \"ucx\"";
    let fabric = s.get("fabric", fix, fabric).unwrap_or_default();
    let mut file = |key| s.get(key, "give the absolute path of a file", path);
    let files = match [file("ca"), file("certificate"), file("key")] {
        [Some(ca), Some(certificate), Some(key)] => {
            Some(Files { ca, own: Some((certificate, key)) })
        }
        [None, None, None] => None,
        _ => {
            let what = "goes with `certificate` and `key`: give all three, or none".into();
            s.problem(
                "ca",
                what,
                "give all three: the authority, and this host's certificate and key",
            );
            None
        }
    };
    let encrypt = s.get("encrypt", "write encrypt = true or false", boolean).unwrap_or(false);
    if encrypt && files.is_none() {
        let what = "needs `ca`, `certificate` and `key`: streams are encrypted for a host that \
                    has proved its identity";
        s.problem("encrypt", what.into(), "give all three, or remove encrypt");
    }
    if !encrypt && files.is_some() {
        let what = "goes with encrypt = true: without encryption certificates prove nothing";
        let fix = "add encrypt = true, on all hosts; or, if everybody in the network between them \
                   is trusted, remove `ca`, `certificate` and `key`";
        s.problem("ca", what.into(), fix);
    }
    if encrypt && port == u16::MAX {
        let what = "encrypted streams go to the next port, and there is none".into();
        s.problem("port", what, "give a smaller port, on all hosts");
    }
    if encrypt && fabric == FabricKind::Ucx {
        let what = "does not go with fabric = \"ucx\", whose messages are not encrypted".into();
        s.problem("encrypt", what, "leave one of them out");
    }
    s.finish();
    ToeConfig { port, fabric, encrypt: files.filter(|_| encrypt) }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::super::Config;
    use super::*;

    fn parse(toe: &str, overlay: &str) -> Result<ToeConfig, String> {
        let text = format!("{toe}\n{overlay}\n[[vm]]\nname = \"a\"\n");
        let config = Config::parse("np.toml", &text, &BTreeMap::new());
        config.map(|config| config.toe.unwrap()).map_err(|e| e.to_string())
    }

    #[test]
    fn an_empty_table_is_enough_with_an_overlay() {
        let overlay = "[[overlay]]\nname = \"o\"\nvni = 7\nlocal = \"192.0.2.1\"\n\
                       peers = [\"192.0.2.2\"]\n";
        let without = |port| Ok(ToeConfig { port, fabric: FabricKind::Tcp, encrypt: None });
        assert_eq!(parse("[toe]", overlay), without(PORT));
        assert_eq!(parse("[toe]\nport = 5000", overlay), without(5000));
        let files = "ca = \"/a\"\ncertificate = \"/c\"\nkey = \"/k\"";
        let all = parse(&format!("[toe]\nencrypt = true\n{files}"), overlay);
        let keys = all.as_ref().unwrap().keys().into_iter();
        let text: Vec<_> = keys.filter_map(|(k, v)| Some(format!("{k} = {}", v?))).collect();
        assert_eq!(text.len(), 6);
        assert_eq!(parse(&format!("[toe]\n{}", text.join("\n")), overlay), all);
        let last = format!("[toe]\n{}\nport = 65535", text[1..].join("\n"));
        let trusting = format!("[toe]\n{files}");
        let both = parse(&format!("[toe]\nfabric = \"ucx\"\nencrypt = true\n{files}"), overlay);
        assert_eq!(both.unwrap_err().contains("toe.encrypt: does not go with"), HAS_UCX);
        for (toe, overlay, said) in [
            ("[toe]", "", "toe.port: needs an [[overlay]]"),
            ("[toe]\nport = 0", overlay, "fix: "),
            ("[toe]\nfabric = \"rdma\"", overlay, "neither"),
            ("[toe]\nca = \"/a\"", overlay, "toe.ca: goes with"),
            ("[toe]\ncertificate = \"/a\"\nkey = \"/k\"", overlay, "toe.ca: goes with"),
            ("[toe]\nca = \"a\"", overlay, "not an absolute path"),
            ("[toe]\nencrypt = true", overlay, "toe.encrypt: needs"),
            ("[toe]\nencrypt = 1", overlay, "toe.encrypt"),
            (&trusting, overlay, "toe.ca: goes with encrypt = true"),
            (&format!("{trusting}\nencrypt = false"), overlay, "add encrypt = true, on all hosts"),
            (&last, overlay, "toe.port: encrypted streams"),
        ] {
            let error = parse(toe, overlay).unwrap_err();
            assert!(error.contains(said) && error.contains("fix: "), "{error}");
        }
    }
}
