//! Answers of etcd or of an impostor: sessions of the registry with a member whose answers are made
//! up, from the bytes of HTTP to news of hosts and stations.
//!
//! Input: what a member says by each connection, as it is; then sessions: keys and values, in pages
//! and events, in chunks of any length, where a session ends, damage. Conditions: a session ends
//! where the answers do, and says why in words for a terminal; news are of stations and hosts that
//! can be, and no longer than they may be. Without damage, and if this host claims nothing, all
//! news together are what a model says.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;

use arbitrary::{Result, Unstructured};
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use nightporter_registry::etcd::Rehearsal;
use nightporter_registry::{Host, Listeners, Mac, News, Registry as _, Station, mac_text};
use serde_json::{Value, json};

use crate::noise;

const PREFIX: &str = "/np/";
const SESSIONS_MAX: usize = 4;
/// Of a value, of a VM's name, and of the reason for an end; addresses and ports of a station.
const VALUE_BYTES_MAX: usize = 4096;
const VM_BYTES_MAX: usize = 64;
const WHY_BYTES_MAX: usize = 300;
const IPS_MAX: usize = 64;
const PORTS_MAX: usize = 64;
/// This host, and what it claims.
const VNI: u32 = 7;
const OWN: &str = "192.0.2.1";
const MAC: Mac = [2, 0, 0, 0, 0, 1];
/// Its lease.
const LEASE: i64 = 5;
const ADDRESSES: [&str; 5] = [OWN, "192.0.2.2", "192.0.2.3", "fd00::2", "::"];

/// Judges one input.
pub fn run(data: &[u8]) {
    let mut world = World::new(true);
    world.hears(data.split(|byte| *byte == 0).map(<[u8]>::to_vec).collect());
    let mut u = Unstructured::new(data);
    let Ok(claims) = u.ratio(1, 4) else { return };
    let mut world = World::new(claims);
    for _ in 0..SESSIONS_MAX {
        if u.is_empty() || world.session(&mut u).is_err() {
            break;
        }
    }
}

/// A conversation in which a station and a host are known, another station comes, and the claims of
/// this host are answered; and sessions of every kind.
#[must_use]
pub fn seeds() -> Vec<Vec<u8>> {
    let (granted, watched) = (json!({"ID": "5", "TTL": "30"}), json!({"result": {}}));
    let station = |last: u8, lease: i64| {
        let mac = mac_text([2, 0, 0, 0, 0, last]);
        let value = json!({"host": "192.0.2.2", "vm": "web", "ips": ["10.0.0.2"],
            "toe": {"ports": [22, 80], "more": 1}});
        kv(format!("{PREFIX}station/7/{mac}").as_bytes(), value.to_string().as_bytes(), 4, lease)
    };
    let host = kv(b"/np/host/7/192.0.2.2", br#"{"port":4789}"#, 3, 9);
    let all = json!({"header": {"revision": "4"}, "kvs": [host, station(1, 9)], "count": "2"});
    let event = json!({"result": {"events": [{"kv": station(2, 9)}]}});
    let instead = json!({"responses": [{"response_range": {"kvs": [station(1, 9)]}}]});
    let done = json!({"header": {"revision": 6}, "responses":
        [{"response_txn": {"succeeded": true}}, {"response_txn": instead}]});
    let mut talk = Vec::new();
    for answer in [granted, all, done.clone(), done] {
        let body = answer.to_string();
        let head = format!("HTTP/1.1 200 OK\r\nContent-Length: {}\r\n\r\n", body.len());
        talk.extend((head + &body).bytes());
    }
    talk.push(0);
    let body = format!("{watched}\n{event}\n");
    let head = "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n";
    talk.extend(format!("{head}{:x}\r\n{body}\r\n0\r\n\r\n", body.len()).bytes());
    let mut seeds: Vec<_> = (1..9).map(|n| noise(n, 200 * n as usize)).collect();
    seeds.push(talk);
    seeds
}

/// The subject of a key.
#[derive(Clone, Copy, Debug, Eq, Ord, PartialEq, PartialOrd)]
enum Name {
    Host(u32, IpAddr),
    Station(u32, Mac),
}

/// The known entries, as news report them.
#[derive(Clone, Debug, Eq, PartialEq)]
enum Thing {
    Host(Host),
    Station(Station),
}

/// A key and what is written there; what that means, if it is about anything.
struct Entry {
    key: Vec<u8>,
    value: Vec<u8>,
    revision: i64,
    lease: i64,
    means: Option<(Name, Option<Thing>)>,
}

impl Entry {
    fn kv(&self) -> Value {
        kv(&self.key, &self.value, self.revision, self.lease)
    }
}

fn kv(key: &[u8], value: &[u8], revision: i64, lease: i64) -> Value {
    json!({
        "key": STANDARD.encode(key), "value": STANDARD.encode(value),
        "create_revision": "1", "version": "1",
        "mod_revision": revision.to_string(), "lease": lease,
    })
}

/// A registry, and what it should know.
struct World {
    rehearsal: Rehearsal,
    claims: bool,
    /// Nothing was damaged so far.
    is_sound: bool,
    has_lease: bool,
    /// With the revision at which it was put there.
    there: BTreeMap<Name, (i64, Option<Thing>)>,
    told: BTreeMap<Name, Thing>,
}

impl World {
    fn new(claims: bool) -> Self {
        let mut rehearsal = Rehearsal::new(PREFIX).expect("descriptors");
        if claims {
            let host = ip(OWN);
            let vm = "own".into();
            let ips = vec![ip("10.0.0.1")];
            rehearsal.registry().join(Host { vni: VNI, address: host, port: 4789 });
            let listeners = None;
            rehearsal.registry().claim(Station { vni: VNI, mac: MAC, vm, ips, host, listeners });
        }
        let (there, told) = (BTreeMap::new(), BTreeMap::new());
        Self { rehearsal, claims, is_sound: true, has_lease: false, there, told }
    }

    /// A session in which a member says this. Whether the registry said that it is connected.
    fn hears(&mut self, answers: Vec<Vec<u8>>) -> bool {
        let why = self.rehearsal.session(answers).expect("nobody has stopped it");
        assert!(why.len() <= WHY_BYTES_MAX && is_plain(&why), "{why:?}");
        let mut is_up = false;
        for news in self.rehearsal.news() {
            is_up |= matches!(news, News::Link(Ok(())));
            self.hears_of(news);
        }
        is_up
    }

    fn hears_of(&mut self, news: News) {
        let (name, thing) = match news {
            News::Host { vni, address, now } => {
                let own = (VNI, ip(OWN));
                if let Some(host) = now {
                    assert_eq!((host.vni, host.address), (vni, address));
                    assert!(host.port > 0 && !(self.claims && own == (vni, address)), "{host:?}");
                }
                (Name::Host(vni, address), now.map(Thing::Host))
            }
            News::Station { vni, mac, now } => {
                if let Some(station) = &now {
                    assert_eq!((station.vni, station.mac), (vni, mac));
                    let is_own = self.claims && (vni, station.host) == (VNI, ip(OWN));
                    assert!(!is_own && can_be(station), "{station:?}");
                }
                (Name::Station(vni, mac), now.map(Thing::Station))
            }
            News::Claim { vni, mac, .. } => {
                return assert!(self.claims && (vni, mac) == (VNI, MAC), "it claims nothing else");
            }
            News::LeftOut(count) => panic!("{count} stations have no place"),
            News::Link(link) => return assert_eq!(link, Ok(()), "the thread alone says so"),
        };
        match thing {
            Some(thing) => self.told.insert(name, thing),
            None => self.told.remove(&name),
        };
    }

    fn session(&mut self, u: &mut Unstructured<'_>) -> Result<()> {
        let mut talk = Talk::default();
        // Drawn first: at the end of its bytes an input would always be damaged, and never judged.
        let is_damaged = u.ratio(1, 4)?;
        let is_up = self.says_all(u, &mut talk)?;
        if is_damaged {
            self.is_sound = false;
            damage(u, &mut talk.first)?;
            damage(u, &mut talk.watch)?;
        }
        let was_up = self.hears(vec![talk.first, talk.watch]);
        if self.is_sound && !self.claims {
            assert_eq!(was_up, is_up, "whether it watches");
            let things = self.there.iter().filter_map(|(name, it)| Some((*name, it.1.clone()?)));
            assert_eq!(self.told, things.collect::<BTreeMap<_, _>>());
        }
        Ok(())
    }

    /// Whether it comes to a watch that goes well as far as it goes.
    fn says_all(&mut self, u: &mut Unstructured<'_>, talk: &mut Talk) -> Result<bool> {
        if self.has_lease {
            if u.ratio(1, 16)? {
                talk.says(u, 200, &json!({"error": {"code": 14, "message": "no leader\u{1b}"}}))?;
                return Ok(false);
            }
            self.has_lease = u.ratio(3, 4)?;
            let left = if self.has_lease { 30 } else { 0 };
            talk.says(u, 200, &json!({"result": {"ID": "5", "TTL": left}}))?;
        }
        if !self.has_lease {
            if u.ratio(1, 16)? {
                talk.says(u, 503, &json!({"code": 14, "message": "x".repeat(500)}))?;
                return Ok(false);
            }
            talk.says(u, 200, &json!({"ID": LEASE.to_string(), "TTL": "30"}))?;
            self.has_lease = true;
        }
        let count = u.int_in_range(0..=12)?;
        let all = (0..count).map(|_| self.entry(u)).collect::<Result<Vec<_>>>()?;
        let mut rest = &all[..];
        loop {
            let (page, more) = rest.split_at(u.int_in_range(0..=rest.len())?);
            rest = more;
            let is_refused = page.is_empty() && !rest.is_empty();
            let kvs: Vec<_> = page.iter().map(Entry::kv).collect();
            let more = !rest.is_empty();
            talk.says(u, 200, &json!({"header": {"revision": "30"}, "kvs": kvs, "more": more}))?;
            if is_refused {
                return Ok(false); // there are more, and none of them is in it
            }
            if rest.is_empty() {
                break;
            }
        }
        if self.claims {
            for _ in 0..u.int_in_range(0..=4)? {
                let done = self.done(u)?;
                talk.says(u, 200, &done)?;
            }
        }
        if u.ratio(1, 16)? {
            let head: &[u8] = if u.arbitrary()? {
                b"HTTP/1.1 400 No\r\nTransfer-Encoding: chunked\r\n\r\n"
            } else {
                b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}"
            };
            talk.watch.extend(head);
            return Ok(false);
        }
        self.there.clear();
        all.into_iter().for_each(|entry| self.is_put(entry));
        self.watches(u, talk)
    }

    fn is_put(&mut self, entry: Entry) {
        if let Some((name, thing)) = entry.means {
            self.there.insert(name, (entry.revision, thing));
        }
    }

    /// Lines of a watch.
    fn watches(&mut self, u: &mut Unstructured<'_>, talk: &mut Talk) -> Result<bool> {
        let mut lines = String::new();
        let mut is_well = false;
        for n in 0..u.int_in_range(0..=6)? {
            if u.ratio(1, 24)? {
                let bad = [
                    json!({"error": {"grpc_code": 14}}),
                    json!({"result": {"canceled": true, "cancel_reason": "\u{202e}why"}}),
                    json!({"result": {"compact_revision": "9"}}),
                    json!({"result": {"events": [{"kv": {"key": "***"}}]}}),
                    json!({"result": {"events": [{"kv": {"mod_revision": "1e3"}}]}}),
                    json!([]),
                ];
                lines += &format!("{}\n", u.choose(&bad)?);
                is_well = false;
                break;
            }
            is_well = true;
            let mut events = Vec::new();
            for _ in 0..if n == 0 { 0 } else { u.int_in_range(1..=4)? } {
                let entry = self.entry(u)?;
                let known = entry.means.as_ref().and_then(|(name, _)| self.there.get(name));
                let is_late = known.is_some_and(|(revision, _)| *revision >= entry.revision);
                if u.ratio(1, 3)? {
                    let mut kv = entry.kv();
                    kv.as_object_mut().expect("it is one").remove("value");
                    events.push(json!({"type": "DELETE", "kv": kv}));
                    if let Some((name, _)) = entry.means.filter(|_| !is_late) {
                        self.there.remove(&name);
                    }
                } else {
                    events.push(json!({"kv": entry.kv(), "prev_kv": null}));
                    if !is_late {
                        self.is_put(entry);
                    }
                }
            }
            lines += &format!("{}\n", json!({"result": {"header": {}, "events": events}}));
        }
        if u.ratio(1, 8)? {
            lines += r#"{"result":{"canceled":tr"#; // and no more of it
        }
        talk.watch.extend(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n");
        chunks(u, &mut talk.watch, lines.as_bytes())?;
        Ok(is_well)
    }

    /// Outcomes of some steps.
    fn done(&self, u: &mut Unstructured<'_>) -> Result<Value> {
        let mut responses = Vec::new();
        for _ in 0..u.int_in_range(0..=3)? {
            let found = if u.arbitrary()? { vec![self.entry(u)?.kv()] } else { Vec::new() };
            let instead = json!([{"response_range": {"kvs": found}}]);
            let one = json!({"succeeded": u.arbitrary::<bool>()?, "responses": instead});
            responses.push(json!({"response_txn": one}));
        }
        Ok(json!({"header": {"revision": u.int_in_range(1..=40)?}, "responses": responses}))
    }

    fn entry(&self, u: &mut Unstructured<'_>) -> Result<Entry> {
        let vni = *u.choose(&[VNI, VNI, 8, u32::MAX])?;
        let address = ip(u.choose(&ADDRESSES)?);
        let (key, value, means) = match u.int_in_range(0..=11)? {
            0 | 1 => {
                let port = *u.choose(&[4789, 4790, 0, u16::MAX])?;
                let value = match u.int_in_range(0..=5)? {
                    0 => "4789".to_owned(),
                    1 => r#"{"port":65536}"#.to_owned(),
                    _ => json!({"port": port, "later": [[]]}).to_string(),
                };
                let is_one = value.contains("later") && port > 0;
                let host = is_one.then_some(Thing::Host(Host { vni, address, port }));
                let means = Some((Name::Host(vni, address), host));
                (format!("host/{vni}/{address}"), value.into_bytes(), means)
            }
            2 => (format!("waiting/{vni}/{}/{address}", mac_text(MAC)), b"{}".to_vec(), None),
            3 => {
                let no_keys =
                    ["", "host/7", "host/07/::", "host/7/::/", "station/7/2:0:0:0:0:1", "x/1/2"];
                let key = (*u.choose(&no_keys)?).to_owned();
                (key, br#"{"host":"192.0.2.2","port":1}"#.to_vec(), None)
            }
            _ => {
                let first = *u.choose(&[2, 2, 2, 0xfe, 1, 0xff])?;
                let mac = [first, 0, 0, 0, 0, u.int_in_range(0..=3)?];
                let (value, station) = station(u, vni, mac)?;
                let means = Some((Name::Station(vni, mac), station.map(Thing::Station)));
                (format!("station/{vni}/{}", mac_text(mac)), value, means)
            }
        };
        // Not of this host, unless it may have some.
        let lease = if self.claims { u.int_in_range(LEASE..=LEASE + 1)? } else { LEASE + 1 };
        let key = [PREFIX, key.as_str()].concat().into_bytes();
        Ok(Entry { key, value, revision: u.int_in_range(1..=20)?, lease, means })
    }
}

/// A station's entry and its meaning.
fn station(u: &mut Unstructured<'_>, vni: u32, mac: Mac) -> Result<(Vec<u8>, Option<Station>)> {
    let host = ip(u.choose(&ADDRESSES)?);
    let mut value = json!({"host": host, "later": {"a": [1]}});
    let (vm, read) = name(u)?;
    if u.ratio(7, 8)? || !vm.is_empty() {
        value["vm"] = vm.into();
    }
    let count = if u.ratio(1, 16)? { IPS_MAX + 3 } else { u.int_in_range(0..=3)? };
    let mut ips = (0..count).map(|_| Ok(ip(u.choose(&ADDRESSES)?))).collect::<Result<Vec<_>>>()?;
    if !ips.is_empty() {
        value["ips"] = json!(ips);
    }
    ips.truncate(IPS_MAX);
    let listeners = match u.int_in_range(0..=5)? {
        0 | 1 => {
            let count = if u.ratio(1, 8)? { PORTS_MAX + 9 } else { u.int_in_range(0..=4)? };
            let ports = (0..count).map(|_| u.arbitrary::<u16>()).collect::<Result<Vec<_>>>()?;
            let more = *u.choose(&[0, 0, 3, 65_534, u32::MAX])?;
            value["toe"] = json!({"ports": ports, "more": more});
            let ports: Vec<u16> = ports.into_iter().collect::<BTreeSet<_>>().into_iter().collect();
            let (named, unnamed) = ports.split_at(ports.len().min(PORTS_MAX));
            let more = (u64::from(more) + unnamed.len() as u64).min(65_535);
            let more = u32::try_from(more).expect("few");
            Some(Listeners { ports: named.to_vec(), more })
        }
        2 => {
            let too_large = json!({"ports": [65_536]});
            let bad = [json!(7), json!([22]), json!({"ports": ["ssh"]}), too_large];
            value["toe"] = u.choose(&bad)?.clone();
            None
        }
        _ => None,
    };
    let mut bytes = value.to_string().into_bytes();
    let is_ruined = u.ratio(1, 8)?;
    if is_ruined {
        match u.int_in_range(0..=4)? {
            0 => bytes.insert(1, 0xff), // no text
            1 => bytes.truncate(bytes.len() - 1),
            2 => bytes.extend([b' '; VALUE_BYTES_MAX]),
            3 => bytes = br#"{"vm":"a"}"#.to_vec(),
            _ => bytes = br#"{"host":"192.0.2"}"#.to_vec(),
        }
    }
    let can_be = !is_ruined && bytes.len() <= VALUE_BYTES_MAX && mac[0] & 1 == 0;
    let station = Station { vni, mac, vm: read, ips, host, listeners };
    Ok((bytes, can_be.then_some(station)))
}

/// A VM's name, and what people read.
fn name(u: &mut Unstructured<'_>) -> Result<(String, String)> {
    let plain = [("a", "a"), ("é", "é"), ("'", "'"), ("\"", "\"")];
    let escaped = [("\\", "\\\\"), ("\n", "\\n"), ("\u{1b}", "\\u{1b}")];
    let letters = [&plain[..], &escaped[..]].concat();
    let (mut name, mut read, mut is_read) = (String::new(), String::new(), true);
    let len = if u.ratio(1, 8)? { 70 } else { u.int_in_range(0..=6)? };
    for _ in 0..len {
        let (letter, shown) = *u.choose(&letters)?;
        name += letter;
        is_read &= read.len() + shown.len() <= VM_BYTES_MAX;
        if is_read {
            read += shown;
        }
    }
    Ok((name, read))
}

/// A member's answers on its first connection, and on the watch's.
#[derive(Default)]
struct Talk {
    first: Vec<u8>,
    watch: Vec<u8>,
}

impl Talk {
    fn says(&mut self, u: &mut Unstructured<'_>, status: u16, body: &Value) -> Result<()> {
        let body = body.to_string();
        self.first.extend(format!("HTTP/1.1 {status} So\r\nX-Other: 1\r\n").bytes());
        if u.arbitrary()? {
            self.first.extend(format!("content-LENGTH:{}\r\n\r\n{body}", body.len()).bytes());
            return Ok(());
        }
        self.first.extend(b"transfer-encoding: chunked\r\n\r\n");
        chunks(u, &mut self.first, body.as_bytes())
    }
}

/// A body in chunks (RFC 9112 section 7.1).
fn chunks(u: &mut Unstructured<'_>, to: &mut Vec<u8>, body: &[u8]) -> Result<()> {
    let mut rest = body;
    while !rest.is_empty() {
        let (now, later) = rest.split_at(u.int_in_range(20..=900)?.min(rest.len()));
        rest = later;
        let extension = if u.ratio(1, 8)? { ";a=b" } else { "" };
        to.extend(format!("{:x}{extension}\r\n", now.len()).bytes());
        to.extend(now);
        to.extend(b"\r\n");
    }
    to.extend(b"0\r\n\r\n");
    Ok(())
}

/// Something else stands at a place.
fn damage(u: &mut Unstructured<'_>, bytes: &mut Vec<u8>) -> Result<()> {
    let at = u.int_in_range(0..=bytes.len())?;
    match u.int_in_range(0..=3)? {
        0 => bytes.truncate(at),
        1 => {
            bytes.splice(at..at, u.arbitrary::<[u8; 3]>()?);
        }
        2 => {
            bytes.drain(at..bytes.len().min(at + 5));
        }
        _ => bytes.iter_mut().skip(at).take(1).for_each(|byte| *byte ^= 1),
    }
    Ok(())
}

/// Whether a station can be, and no word of it is too long.
fn can_be(station: &Station) -> bool {
    let are_ports = station.listeners.as_ref().is_none_or(|it| {
        it.ports.len() <= PORTS_MAX && it.ports.is_sorted_by(|a, b| a < b) && it.more <= 65_535
    });
    let is_named = station.vm.len() <= VM_BYTES_MAX && is_plain(&station.vm);
    are_ports && is_named && station.mac[0] & 1 == 0 && station.ips.len() <= IPS_MAX
}

fn is_plain(text: &str) -> bool {
    !text.chars().any(|c| c.is_control() || ('\u{202a}'..='\u{202e}').contains(&c))
}

fn ip(text: &str) -> IpAddr {
    text.parse().expect("an address")
}
