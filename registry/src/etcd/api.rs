//! What etcd's gateway is asked, and what it says (etcd 3.4, `rpc.proto`, as JSON: numbers of 64
//! bits are strings, bytes are base64).

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use serde::Deserialize;
use serde::de::{Deserializer, Error as _};
use serde_json::{Value, json};

use super::words::VALUE_BYTES_MAX;

/// A key and what is there.
#[derive(Clone, Debug, Default, Deserialize, Eq, PartialEq)]
#[serde(default)]
pub(super) struct Kv {
    #[serde(deserialize_with = "bytes")]
    pub(super) key: Vec<u8>,
    #[serde(deserialize_with = "text")]
    pub(super) value: String,
    #[serde(deserialize_with = "number")]
    pub(super) mod_revision: i64,
    #[serde(deserialize_with = "number")]
    pub(super) lease: i64,
}

impl Kv {
    /// Bytes of both.
    pub(super) fn len(&self) -> usize {
        self.key.len() + self.value.len()
    }
}

#[derive(Clone, Copy, Debug, Default, Deserialize)]
#[serde(default)]
pub(super) struct Header {
    #[serde(deserialize_with = "number")]
    pub(super) revision: i64,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub(super) struct Range {
    pub(super) header: Header,
    pub(super) kvs: Vec<Kv>,
    /// There are more behind these.
    pub(super) more: bool,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub(super) struct Token {
    pub(super) token: String,
}

/// To a grant, and to a sign of life: no seconds are left to a lease that is not there.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub(super) struct Lease {
    #[serde(rename = "ID", deserialize_with = "number")]
    pub(super) id: i64,
    #[serde(rename = "TTL", deserialize_with = "number")]
    pub(super) ttl_s: i64,
}

/// What a stream says.
#[derive(Debug, Deserialize)]
pub(super) struct Streamed<T> {
    pub(super) result: Option<T>,
    pub(super) error: Option<Value>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub(super) struct Watched {
    pub(super) events: Vec<Event>,
    pub(super) canceled: bool,
    #[serde(deserialize_with = "number")]
    pub(super) compact_revision: i64,
    pub(super) cancel_reason: String,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub(super) struct Event {
    /// Something was put there if it is empty.
    #[serde(rename = "type")]
    pub(super) kind: String,
    pub(super) kv: Kv,
}

impl Event {
    pub(super) fn is_deletion(&self) -> bool {
        self.kind == "DELETE"
    }
}

/// To a transaction of transactions.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub(super) struct Done {
    pub(super) header: Header,
    pub(super) responses: Vec<DoneOne>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub(super) struct DoneOne {
    pub(super) response_txn: Outcome,
}

/// To one of them.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub(super) struct Outcome {
    pub(super) succeeded: bool,
    responses: Vec<Found>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct Found {
    response_range: Range,
}

impl Outcome {
    /// What was there instead.
    pub(super) fn found(self) -> Option<Kv> {
        self.responses.into_iter().next()?.response_range.kvs.into_iter().next()
    }
}

/// An answer that is none.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub(super) struct Refusal {
    pub(super) code: i64,
    pub(super) message: String,
}

/// What must be so for a change to be made.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) enum If {
    /// Nothing is there.
    Vacant,
    /// What is there was put there by this.
    Since(i64),
    /// It is of this lease.
    Leased(i64),
    /// Anyhow.
    Any,
}

/// A change of one key.
#[derive(Clone, Debug, Eq, PartialEq)]
pub(super) struct Step {
    pub(super) key: String,
    pub(super) condition: If,
    /// `None`: nothing is there any more.
    pub(super) value: Option<String>,
}

impl Step {
    fn request(&self, lease: i64) -> Value {
        let key = encoded(&self.key);
        let compare = match self.condition {
            If::Vacant => {
                json!([{"key": key, "target": "CREATE", "result": "EQUAL", "create_revision": "0"}])
            }
            If::Since(revision) => {
                let revision = revision.to_string();
                json!([{"key": key, "target": "MOD", "result": "EQUAL", "mod_revision": revision}])
            }
            If::Leased(lease) => {
                let lease = lease.to_string();
                json!([{"key": key, "target": "LEASE", "result": "EQUAL", "lease": lease}])
            }
            If::Any => json!([]),
        };
        let change = match &self.value {
            Some(value) => json!({"request_put":
                {"key": key, "value": encoded(value), "lease": lease.to_string()}}),
            None => json!({"request_delete_range": {"key": key}}),
        };
        json!({"request_txn": {
            "compare": compare, "success": [change], "failure": [{"request_range": {"key": key}}]
        }})
    }
}

/// Changes in one go, each of them if its condition is met.
pub(super) fn transaction(steps: &[Step], lease: i64) -> Value {
    let steps: Vec<_> = steps.iter().map(|step| step.request(lease)).collect();
    json!({"success": steps})
}

/// All keys that begin so.
pub(super) fn range(prefix: &str) -> Value {
    json!({"key": encoded(prefix), "range_end": STANDARD.encode(end_of(prefix))})
}

/// Some of them.
#[derive(Clone, Copy, Debug)]
pub(super) struct Page<'a> {
    /// They are behind this key; the first if there is none.
    pub(super) behind: Option<&'a [u8]>,
    /// As of this revision; 0: of the last.
    pub(super) revision: i64,
    /// So many at most.
    pub(super) limit: usize,
    /// Without what is there.
    pub(super) keys_only: bool,
}

/// The next of all keys that begin so.
pub(super) fn page(prefix: &str, page: Page<'_>) -> Value {
    let Page { behind, revision, limit, keys_only } = page;
    let mut request = range(prefix);
    if let Some(key) = behind {
        request["key"] = STANDARD.encode([key, &[0]].concat()).into();
    }
    request["revision"] = revision.to_string().into();
    request["limit"] = limit.to_string().into();
    request["keys_only"] = keys_only.into();
    request
}

/// What happens to them from this revision on; of much at once not all in one line.
pub(super) fn watch(prefix: &str, revision: i64) -> Value {
    let mut request = range(prefix);
    request["start_revision"] = revision.to_string().into();
    request["fragment"] = true.into();
    json!({"create_request": request})
}

fn encoded(text: &str) -> String {
    STANDARD.encode(text)
}

/// The first key behind those that begin so.
fn end_of(prefix: &str) -> Vec<u8> {
    let mut end = prefix.as_bytes().to_vec();
    if let Some(last) = end.last_mut() {
        *last += 1; // UTF-8 has no 0xff
    }
    end
}

fn number<'de, D: Deserializer<'de>>(from: D) -> Result<i64, D::Error> {
    match Value::deserialize(from)? {
        Value::String(text) => text.parse().map_err(D::Error::custom),
        Value::Number(n) => n.as_i64().ok_or_else(|| D::Error::custom("too large a number")),
        other => Err(D::Error::custom(format!("{other} is not a number"))),
    }
}

fn bytes<'de, D: Deserializer<'de>>(from: D) -> Result<Vec<u8>, D::Error> {
    STANDARD.decode(String::deserialize(from)?).map_err(D::Error::custom)
}

/// Of bytes that are no text, or too many, something is left that is nobody's.
fn text<'de, D: Deserializer<'de>>(from: D) -> Result<String, D::Error> {
    let mut bytes = bytes(from)?;
    if bytes.len() > VALUE_BYTES_MAX {
        bytes.clear();
    }
    Ok(String::from_utf8_lossy(&bytes).into_owned())
}
