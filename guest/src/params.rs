// SPDX-License-Identifier: Apache-2.0
//! The guest's tasks, as `pt.name=value` words of its kernel command line.

use crate::pattern::PAGE_BYTES;

/// A word of the command line that cannot be used.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
pub enum ParamError {
    /// A value is no number with an optional K, M or G.
    #[error("{name}={value} is no size: write a number with an optional K, M or G")]
    NotASize {
        /// Name of the parameter.
        name: String,
        /// What was given.
        value: String,
    },
    /// A name is not known.
    #[error(
        "{0} is no parameter of guest-work: pt.mem, pt.active, pt.file, pt.fio, pt.soak, pt.loads, pt.services, \
         pt.record, pt.seed, \
         pt.pace_us are"
    )]
    Unknown(String),
}

/// Parameters of the work.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Params {
    /// Bytes of anonymous memory to work on.
    pub mem_bytes: u64,
    /// Of it, bytes in constant use; the rest is checked seldom. 0 means all.
    pub active_bytes: u64,
    /// Bytes of `/dev/vda` to work on; 0 leaves the disk alone.
    pub file_bytes: u64,
    /// Bytes of `/dev/vda` that fio works on instead; 0 for none.
    pub fio_bytes: u64,
    /// Seed of a soak, which replaces the two loops ([`crate::soak`]); 0 for none.
    pub soak_seed: u64,
    /// Not 0 if it runs the loads that the host names instead ([`crate::loads`]).
    pub loads: u64,
    /// Not 0 if it serves requests as the host says instead ([`crate::services`]).
    pub services: u64,
    /// Not 0 if its devices' DMA is recorded, and it has servers as the host says instead ([`crate::record`]).
    pub record: u64,
    /// Seed of all content and order.
    pub seed: u64,
    /// Pause of each loop after a step, for a guest that is not fully busy.
    pub pace_us: u64,
}

impl Default for Params {
    fn default() -> Self {
        Self {
            mem_bytes: 160 << 20,
            active_bytes: 0,
            file_bytes: 0,
            fio_bytes: 0,
            soak_seed: 0,
            loads: 0,
            services: 0,
            record: 0,
            seed: 1,
            pace_us: 0,
        }
    }
}

impl Params {
    /// True if it runs the loads that the host names.
    #[must_use]
    pub fn runs_loads(&self) -> bool {
        self.loads != 0
    }

    /// Reads the `pt.` words of a kernel command line.
    ///
    /// # Errors
    /// The first word with an unknown name or a value that is no size.
    pub fn parse(cmdline: &str) -> Result<Self, ParamError> {
        let mut params = Self::default();
        for word in cmdline.split_whitespace() {
            let Some((name, value)) = word.split_once('=') else {
                continue;
            };
            if !name.starts_with("pt.") {
                continue;
            }
            let size = parse_size(value).ok_or_else(|| ParamError::NotASize {
                name: name.to_owned(),
                value: value.to_owned(),
            })?;
            match name {
                "pt.mem" => params.mem_bytes = size,
                "pt.active" => params.active_bytes = size,
                "pt.file" => params.file_bytes = size,
                "pt.fio" => params.fio_bytes = size,
                "pt.soak" => params.soak_seed = size,
                "pt.loads" => params.loads = size,
                "pt.services" => params.services = size,
                "pt.record" => params.record = size,
                "pt.seed" => params.seed = size,
                "pt.pace_us" => params.pace_us = size,
                _ => return Err(ParamError::Unknown(name.to_owned())),
            }
        }
        params.mem_bytes -= params.mem_bytes % PAGE_BYTES as u64;
        params.file_bytes -= params.file_bytes % crate::disk::CHUNK_BYTES;
        Ok(params)
    }

    /// The words [`Params::parse`] reads.
    #[must_use]
    pub fn words(&self) -> String {
        format!(
            "pt.mem={} pt.active={} pt.file={} pt.fio={} pt.soak={} pt.loads={} pt.services={} pt.record={} pt.seed={} \
             pt.pace_us={}",
            self.mem_bytes,
            self.active_bytes,
            self.file_bytes,
            self.fio_bytes,
            self.soak_seed,
            self.loads,
            self.services,
            self.record,
            self.seed,
            self.pace_us
        )
    }
}

fn parse_size(text: &str) -> Option<u64> {
    let (digits, shift) = match text.as_bytes().last()? {
        b'K' => (&text[..text.len() - 1], 10),
        b'M' => (&text[..text.len() - 1], 20),
        b'G' => (&text[..text.len() - 1], 30),
        _ => (text, 0),
    };
    let Ok(number) = digits.parse::<u64>() else {
        return None;
    };
    number.checked_mul(1 << shift)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_parsed_again_are_the_same_params() {
        let params = Params {
            mem_bytes: 5 << 20,
            active_bytes: 1 << 20,
            file_bytes: 3 << 20,
            fio_bytes: 2 << 20,
            soak_seed: 5,
            loads: 1,
            services: 1,
            record: 2,
            seed: 9,
            pace_us: 20,
        };
        assert_eq!(
            Params::parse(&format!("quiet {} ro", params.words())),
            Ok(params)
        );
    }

    #[test]
    fn suffixes_are_powers_of_1024() {
        let params = Params::parse("pt.mem=160M pt.file=1G").expect("both are sizes");
        assert_eq!((params.mem_bytes, params.file_bytes), (160 << 20, 1 << 30));
    }

    #[test]
    fn wrong_words_are_named() {
        assert!(matches!(
            Params::parse("pt.mem=lots"),
            Err(ParamError::NotASize { .. })
        ));
        assert_eq!(
            Params::parse("pt.men=1"),
            Err(ParamError::Unknown("pt.men".to_owned()))
        );
    }
}
