//! The thread that talks to etcd: one session at a time, with one member.
//!
//! A session gets a lease (the old one if it is still valid), reads all entries, and watches from
//! there on; then it claims, renews the lease and follows the watch until an error. Then another
//! session begins with the next member and reads all entries again: so a compaction, the end of a
//! watch and the death of a member are one case.

use std::io;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use serde::de::DeserializeOwned;
use serde_json::{Value, json};

use super::api::{self, Done, Kv, Lease, Page, Range, Refusal, Streamed, Token, Watched};
use super::entries::{BYTES_MAX, EntryTable, KEYS_MAX, Wanted};
use super::http::{Conn, Lines, Patience, Stop};
use super::schema::{Key, plain};
use super::{Config, Tls, Topic};
use crate::mail::{Bell, Gone, Inbox, Outbox};
use crate::{News, STATIONS_MAX};

/// Keys of one answer, at most: half a megabyte, as a rule.
const PAGE_MAX: usize = 2048;
/// Steps of one transaction: a member takes 128, and counts both levels (`--max-txn-ops`).
const STEPS_MAX: usize = 60;
/// Most rounds of steps, as when other hosts are faster.
const ROUNDS_MAX: usize = 8;
/// Shortest and longest pause between two rounds of all members.
const REST_MIN: Duration = Duration::from_millis(100);
const REST_MAX: Duration = Duration::from_secs(1);
/// Most bytes of an error's text.
const WHY_BYTES_MAX: usize = 300;
/// gRPC's code for an expired token.
const UNAUTHENTICATED: i64 = 16;

/// Why a session ended.
#[derive(Debug)]
pub(super) enum End {
    /// The registry was dropped.
    Stopped,
    /// The next session is with the same member.
    Stale(String),
    /// The lease has expired; the next session is with the same member.
    Expired,
    /// The member answers wrongly or not at all.
    Failed(String),
    /// An answer is too large.
    TooLarge,
}

impl From<io::Error> for End {
    fn from(e: io::Error) -> Self {
        if e.kind() == io::ErrorKind::FileTooLarge {
            return Self::TooLarge;
        }
        Self::Failed(e.to_string())
    }
}

impl From<Gone> for End {
    fn from(_: Gone) -> Self {
        Self::Stopped
    }
}

/// See the module doc.
pub(super) struct Thread {
    pub(super) config: Config,
    pub(super) bell: Bell,
    pub(super) wishes: Inbox<(Key, Option<Wanted>)>,
    pub(super) news: Outbox<Topic, News>,
    pub(super) known: EntryTable,
    patience: Patience,
    lease: Option<i64>,
    /// The member of this session or the next.
    member: usize,
    /// Time since which the session follows the watch.
    up: Option<Instant>,
    /// Members that have failed since the last session that lasted.
    failed: usize,
    rest: Duration,
}

/// A connection for requests to one member.
struct Member<'a> {
    config: &'a Config,
    patience: &'a Patience,
    member: usize,
    conn: Conn,
    token: Option<String>,
    /// Time of the next keep-alive, and its lease.
    sign: Option<(Instant, i64)>,
}

impl Thread {
    pub(super) fn new(
        config: Config,
        bell: Bell,
        stop: Stop,
        wishes: Inbox<(Key, Option<Wanted>)>,
        news: Outbox<Topic, News>,
    ) -> Self {
        let known = EntryTable::new(&config.prefix, STATIONS_MAX);
        let patience = Patience::new(Duration::from_secs(config.ttl_s.into()), stop);
        Self {
            config,
            bell,
            wishes,
            news,
            known,
            patience,
            lease: None,
            member: 0,
            up: None,
            failed: 0,
            rest: REST_MIN,
        }
    }

    /// Runs sessions until the registry is dropped.
    pub(super) fn run(mut self) {
        while let Some((why, is_same)) = self.one_session() {
            if self.handle_end(why, is_same).is_err() {
                return;
            }
        }
    }

    /// Runs a session; returns why it ended, for operators, and whether the next is with the same
    /// member. `None`: no session follows.
    pub(super) fn one_session(&mut self) -> Option<(String, bool)> {
        let ended = self.session();
        let up = self.up.take();
        if up.is_some_and(|since| since.elapsed() >= REST_MAX) {
            (self.failed, self.rest) = (0, REST_MIN);
        }
        let (why, is_same) = match ended {
            End::Stopped => return None,
            End::Expired => {
                self.lease = None;
                self.known.set_lease(None);
                ("the lease has run out".into(), up.is_some())
            }
            End::Stale(why) => (why, up.is_some()),
            End::Failed(why) => (why, false),
            End::TooLarge => ("an answer without an end".into(), false),
        };
        let address = self.config.members[self.member].address;
        Some((plain(&format!("{address}: {why}"), WHY_BYTES_MAX), is_same))
    }

    /// Chooses the member of the next session; waits if all have failed.
    fn handle_end(&mut self, why: String, is_same: bool) -> Result<(), Gone> {
        if is_same {
            tracing::info!("etcd: {why}; another session");
            return self.rest(REST_MIN);
        }
        self.member = (self.member + 1) % self.config.members.len();
        self.failed += 1;
        if self.failed < self.config.members.len() {
            tracing::info!("etcd: {why}; trying another member");
            return self.rest(Duration::ZERO);
        }
        self.failed = 0;
        self.news.post(Topic::Link, News::Link(Err(why)));
        let rest = self.rest;
        self.rest = REST_MAX.min(rest * 2);
        self.rest(rest)
    }

    /// Waits, and takes new wishes meanwhile.
    fn rest(&mut self, time: Duration) -> Result<(), Gone> {
        let until = Instant::now() + time;
        loop {
            self.exchange()?;
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Ok(());
            }
            wait(&self.bell, None, left);
        }
    }

    /// Takes new wishes and reports changes.
    pub(super) fn exchange(&mut self) -> Result<(), Gone> {
        self.take_wishes()?;
        self.post_news();
        Ok(())
    }

    fn take_wishes(&mut self) -> Result<(), Gone> {
        while let Some((key, wanted)) = self.wishes.take()? {
            self.known.want(key, wanted);
        }
        Ok(())
    }

    fn post_news(&mut self) {
        self.news.flush();
        for (topic, news) in self.known.take_news() {
            self.news.post(topic, news);
        }
    }

    /// Runs a session with the present member.
    fn session(&mut self) -> End {
        match self.config.tls.as_mut().map(Tls::renew) {
            Some(Ok(true)) => tracing::info!("etcd: certificates have changed"),
            Some(Err(e)) => tracing::warn!("etcd: {e}; what was there before is used"),
            Some(Ok(false)) | None => {}
        }
        let (config, patience) = (self.config.clone(), self.patience.clone());
        let begun = Member::open(&config, &patience, self.member).and_then(|mut member| {
            let lines = self.begin(&mut member)?;
            Ok((member, lines))
        });
        match begun {
            Err(end) => end,
            Ok((mut member, mut lines)) => match self.serve(&mut member, &mut lines) {
                Err(End::Stopped) => self.say_goodbye(&mut member),
                Err(end) => end,
                Ok(never) => match never {},
            },
        }
    }

    fn begin(&mut self, member: &mut Member<'_>) -> Result<Lines, End> {
        if let Some(lease) = self.lease
            && !member.keep_alive(lease)?
        {
            self.lease = None;
            self.known.set_lease(None);
        }
        let lease = match self.lease {
            Some(lease) => lease,
            None => member.grant()?,
        };
        if self.lease.replace(lease).is_none() {
            self.known.set_lease(Some(lease));
        }
        let (all, revision) = member.read_all()?;
        let watch = api::watch(&self.config.prefix, revision + 1);
        member.sign_if_due()?;
        let lines = member.follow("/v3/watch", &watch)?;
        self.known.set_all(all);
        Ok(lines)
    }

    fn serve(&mut self, member: &mut Member<'_>, lines: &mut Lines) -> Result<Never, End> {
        let mut is_heard = false;
        loop {
            for line in lines.take()? {
                self.handle_line(&line)?;
                is_heard = true; // the first line confirms the watch
            }
            look_for_room(self.known.len())?;
            self.take_wishes()?;
            self.settle(member)?;
            if is_heard && self.up.is_none() {
                self.up = Some(Instant::now());
                self.news.post(Topic::Link, News::Link(Ok(())));
            }
            self.post_news();
            member.sign_if_due()?;
            let left = member
                .sign
                .map_or(REST_MAX, |(due, _)| due.saturating_duration_since(Instant::now()));
            wait(&self.bell, Some(lines), left);
        }
    }

    fn handle_line(&mut self, line: &[u8]) -> Result<(), End> {
        let said: Streamed<Watched> = read(line)?;
        let Some(watched) = said.result else {
            return Err(End::Failed(format!("the watch ended: {:?}", said.error)));
        };
        if watched.compact_revision > 0 {
            return Err(End::Stale("what the watch was to begin with is compacted".into()));
        }
        if watched.canceled {
            return Err(End::Failed(format!("the watch was ended: {}", watched.cancel_reason)));
        }
        watched.events.into_iter().for_each(|event| self.known.handle_event(event));
        Ok(())
    }

    /// Brings the entries to the wanted state.
    fn settle(&mut self, member: &mut Member<'_>) -> Result<(), End> {
        for _ in 0..ROUNDS_MAX {
            let steps = self.known.steps();
            if steps.is_empty() {
                return Ok(());
            }
            let lease = self.lease.unwrap_or_default();
            for part in steps.chunks(STEPS_MAX) {
                member.sign_if_due()?;
                let (_, only): (Vec<_>, Vec<_>) = part.iter().cloned().unzip();
                let done: Done = member.ask("/v3/kv/txn", &api::transaction(&only, lease))?;
                for ((key, step), one) in part.iter().zip(done.responses) {
                    let outcome = one.response_txn;
                    self.known.handle_outcome(*key, step, outcome, done.header.revision);
                }
                self.post_news();
            }
        }
        Ok(())
    }

    /// Deletes all entries of this host at once.
    fn say_goodbye(&self, member: &mut Member<'_>) -> End {
        let lease = json!({"ID": self.lease.unwrap_or_default().to_string()});
        if let Err(e) = member.ask::<Value>("/v3/lease/revoke", &lease) {
            tracing::info!("etcd: what is of this host stays until its lease runs out: {e:?}");
        }
        End::Stopped
    }
}

/// Fails if there are too many keys; then the entries known before stay in force.
fn look_for_room((keys, bytes): (usize, usize)) -> Result<(), End> {
    let too_many = |what: String| End::Failed(format!("there are {what} or more below the prefix"));
    match (keys, bytes) {
        (KEYS_MAX.., _) => Err(too_many(format!("{KEYS_MAX} keys"))),
        (_, BYTES_MAX..) => Err(too_many(format!("{BYTES_MAX} bytes"))),
        _ => Ok(()),
    }
}

/// A type without values.
enum Never {}

impl<'a> Member<'a> {
    fn open(config: &'a Config, patience: &'a Patience, member: usize) -> Result<Self, End> {
        let conn = connect(config, patience, member)?;
        let mut new = Self { config, patience, member, conn, token: None, sign: None };
        if let Some((name, password)) = &config.user {
            let login = json!({"name": name, "password": password});
            let got: Token = new.ask("/v3/auth/authenticate", &login)?;
            new.token = Some(got.token);
        }
        Ok(new)
    }

    fn ask<T: DeserializeOwned>(&mut self, path: &str, body: &Value) -> Result<T, End> {
        let body = body.to_string();
        let (status, answer) = self.conn.ask(path, self.token.as_deref(), body.as_bytes())?;
        if status == 200 {
            return read(&answer);
        }
        let refusal: Refusal = read(&answer).unwrap_or_default();
        let what = match refusal.message.as_str() {
            "" => String::from_utf8_lossy(&answer[..answer.len().min(200)]).into_owned(),
            message => message.into(),
        };
        match refusal.code {
            UNAUTHENTICATED if self.token.is_some() => Err(End::Stale(what)),
            _ => Err(End::Failed(format!("{what} (HTTP status {status})"))),
        }
    }

    /// A new lease.
    fn grant(&mut self) -> Result<i64, End> {
        self.sign = None;
        let due = self.next_sign();
        let ttl_s = self.config.ttl_s.to_string();
        let granted: Lease = self.ask("/v3/lease/grant", &json!({"TTL": ttl_s}))?;
        self.sign = Some((due, granted.id));
        Ok(granted.id)
    }

    /// Time of the keep-alive that follows one sent now.
    fn next_sign(&self) -> Instant {
        Instant::now() + Duration::from_secs(self.config.ttl_s.into()) / 3
    }

    /// Renews the lease if that is due. To be called before every request about leased entries.
    fn sign_if_due(&mut self) -> Result<(), End> {
        let Some((due, lease)) = self.sign else { return Ok(()) };
        let is_fine = Instant::now() < due || self.keep_alive(lease)?;
        if is_fine { Ok(()) } else { Err(End::Expired) }
    }

    /// All entries, and the revision of the answer. An entry that is too large to read has no
    /// value.
    fn read_all(&mut self) -> Result<(Vec<Kv>, i64), End> {
        let (mut all, mut bytes) = (Vec::<Kv>::new(), 0);
        let (mut revision, mut limit, mut keys_only) = (0, PAGE_MAX, false);
        loop {
            self.sign_if_due()?;
            let behind = all.last().map(|kv| &kv.key[..]);
            let page = Page { behind, revision, limit, keys_only };
            let request = api::page(&self.config.prefix, page);
            let part: Range = match self.ask("/v3/kv/range", &request) {
                Err(End::TooLarge) if !keys_only => {
                    (limit, keys_only) = ((limit / 8).max(1), limit == 1);
                    self.conn = connect(self.config, self.patience, self.member)?;
                    continue;
                }
                part => part?,
            };
            if revision == 0 {
                revision = part.header.revision;
            }
            if part.more && part.kvs.is_empty() {
                return Err(End::Failed("a page without keys".into()));
            }
            (limit, keys_only) = (PAGE_MAX.min(limit * 2), false);
            bytes += part.kvs.iter().map(Kv::len).sum::<usize>();
            all.extend(part.kvs);
            look_for_room((all.len(), bytes))?;
            if !part.more {
                return Ok((all, revision));
            }
        }
    }

    /// Sends a keep-alive; returns whether the lease is valid.
    fn keep_alive(&mut self, lease: i64) -> Result<bool, End> {
        self.sign = Some((self.next_sign(), lease));
        let body = json!({"ID": lease.to_string()});
        let said: Streamed<Lease> = self.ask("/v3/lease/keepalive", &body)?;
        let lease = said.result.ok_or_else(|| End::Failed(format!("{:?}", said.error)))?;
        Ok(lease.ttl_s > 0)
    }

    /// Opens a watch, which has a connection of its own.
    fn follow(&self, path: &str, body: &Value) -> Result<Lines, End> {
        let conn = connect(self.config, self.patience, self.member)?;
        Ok(conn.follow(path, self.token.as_deref(), body.to_string().as_bytes())?)
    }
}

pub(super) fn connect(config: &Config, patience: &Patience, member: usize) -> io::Result<Conn> {
    let tls = config.tls.as_ref().map(Tls::config);
    Conn::open(config.members[member], config.connector.connect(member)?, tls, patience)
}

fn read<T: DeserializeOwned>(bytes: &[u8]) -> Result<T, End> {
    serde_json::from_slice(bytes).map_err(|e| End::Failed(format!("not what etcd says: {e}")))
}

/// Waits for lines, the bell or the end of `time`.
fn wait(bell: &Bell, lines: Option<&Lines>, time: Duration) {
    let mut fds = vec![PollFd::from_borrowed_fd(bell.fd(), PollFlags::IN)];
    fds.extend(lines.map(|lines| PollFd::from_borrowed_fd(lines.fd(), PollFlags::IN)));
    let time = Timespec::try_from(time).ok();
    // The caller checks all sources, whatever `poll` returns.
    let _ = poll(&mut fds, time.as_ref());
}

#[cfg(test)]
mod tests {
    use super::super::tests::config;
    use super::super::{Endpoint, Etcd};
    use super::*;
    use crate::Registry as _;

    #[test]
    fn too_many_keys_or_bytes_end_a_session() {
        assert!(look_for_room((KEYS_MAX - 1, BYTES_MAX - 1)).is_ok());
        assert!(look_for_room((KEYS_MAX, 0)).is_err());
        assert!(look_for_room((0, BYTES_MAX)).is_err());
    }

    #[test]
    fn a_member_that_fails_is_told_of_when_all_others_have_failed_as_well() {
        let address = ([127, 0, 0, 1], 2379).into();
        let members = vec![Endpoint { address, is_tls: false }; 3];
        let (mut etcd, mut thread) = Etcd::prepare(config(members)).unwrap();
        for is_told in [false, false, true, false, false, true] {
            thread.handle_end("why".into(), false).unwrap();
            thread.exchange().unwrap();
            let news = etcd.poll();
            assert_eq!(matches!(news, Some(News::Link(Err(_)))), is_told, "{news:?}");
        }
    }
}
