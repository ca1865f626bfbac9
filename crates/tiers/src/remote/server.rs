// SPDX-License-Identifier: Apache-2.0
//! What is asked of a server when a connection to it is made, and what its answers mean.
//!
//! A server that evicts keys loses pages without a word, so its `maxmemory-policy` must be `noeviction`.
//! `CONFIG GET` tells; a user without the right to it may still read `INFO memory`; if neither is allowed,
//! the operator may vouch for the policy. `volatile-…` policies would spare keys without an expiry, as ours
//! are, but are refused too: a policy that evicts is one `EXPIRE` away from losing pages.
//!
//! Everything here comes from the wire. A reply of an unexpected type is an answer that says nothing, and
//! texts are cut and cleaned before anybody prints them ([`describe`]).

use redis::aio::ConnectionLike;
use redis::{ErrorKind, RedisError, Value};

use super::address::{EvictionPolicy, RemoteAddress};
use crate::figures::Durability;

/// Most characters of a server's text that are repeated in an error or a log.
const TEXT_CHARS_MAX: usize = 200;

/// Checks that the server keeps what it is given; returns what it keeps across its end.
pub(super) async fn check(
    node: &mut (impl ConnectionLike + Send),
    wanted: EvictionPolicy,
) -> Result<Durability, RedisError> {
    let policy = match setting(node, "maxmemory-policy").await? {
        Some(policy) => Some(policy),
        None => line_of(node, "memory", "maxmemory_policy").await?,
    };
    match (policy.as_deref(), wanted) {
        (Some("noeviction"), _) | (None, EvictionPolicy::Vouched) => {}
        (Some(policy), _) => {
            return Err(refusal(format!(
                "its maxmemory-policy is {policy}, so it may drop pages: set it to noeviction"
            )));
        }
        (None, EvictionPolicy::Asked) => {
            return Err(refusal(
                "it does not say whether it evicts keys: allow its user +config|get or +info, or vouch for \
                 it by noeviction=vouched"
                    .to_owned(),
            ));
        }
    }
    durability(node).await
}

async fn durability(node: &mut (impl ConnectionLike + Send)) -> Result<Durability, RedisError> {
    let logged = match setting(node, "appendonly").await? {
        Some(value) => Some(value == "yes"),
        None => line_of(node, "persistence", "aof_enabled")
            .await?
            .map(|value| value == "1"),
    };
    let synced = match logged {
        Some(true) => setting(node, "appendfsync").await?,
        _ => None,
    };
    Ok(match (logged, synced.as_deref()) {
        (None, _) => Durability::Unknown,
        (Some(false), _) => Durability::Nothing,
        (Some(true), Some("always")) => Durability::Always,
        (Some(true), _) => Durability::Lagging,
    })
}

/// A setting by `CONFIG GET`; nothing if the server refuses to say.
async fn setting(
    node: &mut (impl ConnectionLike + Send),
    name: &str,
) -> Result<Option<String>, RedisError> {
    let answer = ask(node, redis::cmd("CONFIG").arg("GET").arg(name)).await?;
    Ok(match answer {
        Some(Value::Array(items)) => match items.as_slice() {
            [key, value] if text(key) == Some(name) => text(value).map(str::to_owned),
            _ => None,
        },
        Some(Value::Map(pairs)) => match pairs.as_slice() {
            [(key, value)] if text(key) == Some(name) => text(value).map(str::to_owned),
            _ => None,
        },
        _ => None,
    })
}

/// A line of a section of `INFO`; nothing if the server refuses to say.
async fn line_of(
    node: &mut (impl ConnectionLike + Send),
    section: &str,
    name: &str,
) -> Result<Option<String>, RedisError> {
    let answer = ask(node, redis::cmd("INFO").arg(section)).await?;
    let lines = answer.as_ref().and_then(text).unwrap_or_default();
    Ok(lines
        .lines()
        .filter_map(|line| line.split_once(':'))
        .find(|(key, _)| *key == name)
        .map(|(_, value)| value.trim().to_owned()))
}

/// A reply; nothing if the server refuses the command.
async fn ask(
    node: &mut (impl ConnectionLike + Send),
    command: &redis::Cmd,
) -> Result<Option<Value>, RedisError> {
    let reply = node.req_packed_command(command).await;
    match reply.and_then(Value::extract_error) {
        Ok(value) => Ok(Some(value)),
        Err(error) if error.code() == Some("NOAUTH") => Err(refusal(
            "it wants a password: write it as redis://:password@host or add password-file=FILE"
                .to_owned(),
        )),
        Err(error) if matches!(error.kind(), ErrorKind::Server(_) | ErrorKind::Extension) => {
            Ok(None)
        }
        Err(error) => Err(error),
    }
}

fn text(value: &Value) -> Option<&str> {
    match value {
        Value::BulkString(bytes) => std::str::from_utf8(bytes).ok(),
        Value::SimpleString(text) | Value::VerbatimString { text, .. } => Some(text),
        _ => None,
    }
}

fn refusal(sentence: String) -> RedisError {
    RedisError::from((ErrorKind::Client, "the server is refused", sentence))
}

/// An error as people may read it: without the password, even if the server repeats it, without control
/// characters, and of a bounded length.
pub(super) fn describe(error: &RedisError, address: &RemoteAddress) -> String {
    let told = match error.kind() {
        ErrorKind::Client => error.detail().unwrap_or_default().to_owned(),
        ErrorKind::AuthenticationFailed => format!(
            "it refuses the user or the password: {}",
            error.detail().unwrap_or_default()
        ),
        _ => error.to_string(),
    };
    clean(&address.without_secret(&told))
}

fn clean(text: &str) -> String {
    let printable = text.chars().map(|c| if c.is_control() { ' ' } else { c });
    let mut short: String = printable.clone().take(TEXT_CHARS_MAX).collect();
    if printable.count() > TEXT_CHARS_MAX {
        short.push('…');
    }
    short
}

#[cfg(test)]
mod tests {
    use super::*;
    use redis::{Cmd, Pipeline, RedisFuture};

    /// Answers by the command's words.
    struct Fake(fn(&str) -> Value);

    impl ConnectionLike for Fake {
        fn req_packed_command<'a>(&'a mut self, command: &'a Cmd) -> RedisFuture<'a, Value> {
            let words: Vec<_> = command
                .args_iter()
                .map(|word| match word {
                    redis::Arg::Simple(bytes) => String::from_utf8_lossy(bytes).into_owned(),
                    _ => String::new(),
                })
                .collect();
            let value = (self.0)(&words.join(" "));
            Box::pin(async move { value.extract_error() })
        }

        fn req_packed_commands<'a>(
            &'a mut self,
            _: &'a Pipeline,
            _: usize,
            _: usize,
        ) -> RedisFuture<'a, Vec<Value>> {
            Box::pin(async { Ok(Vec::new()) })
        }

        fn get_db(&self) -> i64 {
            0
        }
    }

    fn checked(answer: fn(&str) -> Value, policy: EvictionPolicy) -> Result<Durability, String> {
        let runtime = tokio::runtime::Builder::new_current_thread()
            .build()
            .unwrap();
        let address = RemoteAddress::parse("redis://far").unwrap();
        runtime
            .block_on(check(&mut Fake(answer), policy))
            .map_err(|error| describe(&error, &address))
    }

    fn bulk(text: &str) -> Value {
        Value::BulkString(text.as_bytes().to_vec())
    }

    fn config(command: &str, value: &str) -> Value {
        let name = command.rsplit(' ').next().unwrap();
        Value::Array(vec![bulk(name), bulk(value)])
    }

    #[test]
    fn server_that_may_evict_is_refused() {
        let answer = |command: &str| config(command, "allkeys-lru");
        for policy in [EvictionPolicy::Asked, EvictionPolicy::Vouched] {
            let error = checked(answer, policy).unwrap_err();
            assert!(
                error.contains("allkeys-lru") && error.contains("noeviction"),
                "{error}"
            );
        }
    }

    #[test]
    fn settings_tell_what_outlives_the_server() {
        let always = |command: &str| match command {
            "CONFIG GET maxmemory-policy" => config(command, "noeviction"),
            "CONFIG GET appendonly" => config(command, "yes"),
            "CONFIG GET appendfsync" => config(command, "always"),
            _ => Value::Nil,
        };
        assert_eq!(
            checked(always, EvictionPolicy::Asked),
            Ok(Durability::Always)
        );
        let lagging = |command: &str| match command {
            "CONFIG GET maxmemory-policy" => config(command, "noeviction"),
            "CONFIG GET appendonly" => config(command, "yes"),
            _ => config(command, "everysec"),
        };
        assert_eq!(
            checked(lagging, EvictionPolicy::Asked),
            Ok(Durability::Lagging)
        );
        let nothing = |command: &str| match command {
            "CONFIG GET maxmemory-policy" => config(command, "noeviction"),
            _ => config(command, "no"),
        };
        assert_eq!(
            checked(nothing, EvictionPolicy::Asked),
            Ok(Durability::Nothing)
        );
    }

    #[test]
    fn info_answers_where_config_is_forbidden() {
        let answer = |command: &str| match command {
            "INFO memory" => bulk("# Memory\r\nused_memory:1\r\nmaxmemory_policy:noeviction\r\n"),
            "INFO persistence" => bulk("# Persistence\r\naof_enabled:0\r\n"),
            _ => Value::Nil,
        };
        assert_eq!(
            checked(answer, EvictionPolicy::Asked),
            Ok(Durability::Nothing)
        );
        let evicts = |command: &str| match command {
            "INFO memory" => bulk("maxmemory_policy:volatile-ttl\r\n"),
            _ => Value::Nil,
        };
        assert!(checked(evicts, EvictionPolicy::Vouched).is_err());
    }

    #[test]
    fn silent_server_needs_the_operators_word() {
        for answer in [
            |_: &str| Value::Nil,
            |_: &str| Value::Int(7),
            |_: &str| Value::Array(vec![Value::Nil; 2]),
            |_: &str| Value::Array(vec![bulk("appendonly"), bulk("noeviction")]),
            |_: &str| Value::BulkString(vec![0xff; 64]),
        ] {
            let error = checked(answer, EvictionPolicy::Asked).unwrap_err();
            assert!(error.contains("noeviction=vouched"), "{error}");
            assert_eq!(
                checked(answer, EvictionPolicy::Vouched).map(|known| known != Durability::Always),
                Ok(true)
            );
        }
    }

    #[test]
    fn text_of_a_server_is_short_and_printable_and_has_no_password() {
        let address = RemoteAddress::parse("redis://:hunter2@far").unwrap();
        let detail = format!("hunter2\r\n\x1b[31m{}", "x".repeat(1000));
        let error = RedisError::from((ErrorKind::AuthenticationFailed, "no", detail));
        let text = describe(&error, &address);
        assert!(!text.contains("hunter2") && text.contains("***"), "{text}");
        assert!(!text.contains(char::is_control));
        assert_eq!(text.chars().count(), TEXT_CHARS_MAX + 1);
    }
}
