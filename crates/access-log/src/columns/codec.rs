// SPDX-License-Identifier: Apache-2.0
//! Decompresses the pages of a column, to no more bytes than their values can take.
//!
//! Our own files are LZ4. A trace rewritten by another tool is snappy, as most tools have it by default, zstd or
//! gzip. The `parquet` crate could decompress all of them, but only bounds their output by what the page's
//! header claims (gzip not even by that), so a page of some kilobytes could take gigabytes. Here the number
//! of values gives the bound, and nothing claims more: [`super::contain::CheckedPages`] has checked that
//! number before.

use std::io::Read;

use parquet::basic::Compression;
use parquet::column::page::Page;
use parquet::errors::{ParquetError, Result as ParquetResult};

/// Most bytes of a page, decompressed. Writers aim at 1 MiB.
const PAGE_BYTES_MAX: u64 = 64 << 20;

/// Bytes that a page may have beside its values: lengths, and the last block of a delta encoding, which is
/// padded.
const PAGE_EXTRA_BYTES: u64 = 64 << 10;

/// How a column's pages are compressed.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Codec {
    None,
    Lz4,
    /// Blocks with a header in front, as Hadoop wrote them.
    Lz4Hadoop,
    Snappy,
    Zstd,
    Gzip,
}

impl Codec {
    /// The codec of `compression`.
    ///
    /// # Errors
    /// If pages compressed so are not read.
    pub(super) fn of(compression: Compression) -> Result<Self, String> {
        match compression {
            Compression::UNCOMPRESSED => Ok(Self::None),
            Compression::LZ4_RAW => Ok(Self::Lz4),
            Compression::LZ4 => Ok(Self::Lz4Hadoop),
            Compression::SNAPPY => Ok(Self::Snappy),
            Compression::ZSTD(_) => Ok(Self::Zstd),
            Compression::GZIP(_) => Ok(Self::Gzip),
            other => Err(format!(
                "it is compressed by {other}; lz4, snappy, zstd and gzip are read"
            )),
        }
    }

    /// The page with its values as they were before compression; `value_bytes` is the size of one.
    ///
    /// # Errors
    /// If it is broken, or has more bytes than its values can take.
    pub(super) fn decompressed(self, page: Page, value_bytes: u64) -> ParquetResult<Page> {
        if self == Self::None {
            return Ok(page);
        }
        match page {
            Page::DictionaryPage {
                buf,
                num_values,
                encoding,
                is_sorted,
            } => {
                let bytes_max = u64::from(num_values) * value_bytes;
                Ok(Page::DictionaryPage {
                    buf: self.output(&buf, bytes_max)?.into(),
                    num_values,
                    encoding,
                    is_sorted,
                })
            }
            Page::DataPage {
                buf,
                num_values,
                encoding,
                def_level_encoding,
                rep_level_encoding,
                statistics,
            } => Ok(Page::DataPage {
                buf: self
                    .output(&buf, data_bytes_max(num_values, value_bytes))?
                    .into(),
                num_values,
                encoding,
                def_level_encoding,
                rep_level_encoding,
                statistics,
            }),
            Page::DataPageV2 {
                is_compressed: false,
                ..
            } => Ok(page),
            Page::DataPageV2 {
                buf,
                num_values,
                encoding,
                num_nulls,
                num_rows,
                def_levels_byte_len,
                rep_levels_byte_len,
                is_compressed: true,
                statistics,
            } => {
                let levels = u64::from(def_levels_byte_len) + u64::from(rep_levels_byte_len);
                let bytes_max = data_bytes_max(num_values, value_bytes);
                Ok(Page::DataPageV2 {
                    buf: self.after_levels(&buf, levels, bytes_max)?.into(),
                    num_values,
                    encoding,
                    num_nulls,
                    num_rows,
                    def_levels_byte_len,
                    rep_levels_byte_len,
                    is_compressed: false,
                    statistics,
                })
            }
        }
    }

    /// A page whose first `levels` bytes are not compressed, and whose others are.
    fn after_levels(self, input: &[u8], levels: u64, bytes_max: u64) -> ParquetResult<Vec<u8>> {
        let (levels, values) = usize::try_from(levels)
            .ok()
            .and_then(|levels| input.split_at_checked(levels))
            .ok_or_else(|| broken("its levels are longer than its page"))?;
        let mut whole = levels.to_vec();
        if !values.is_empty() {
            whole.append(&mut self.output(values, bytes_max)?);
        }
        Ok(whole)
    }

    /// What `input` is decompressed, if that is `bytes_max` bytes at most.
    fn output(self, input: &[u8], bytes_max: u64) -> ParquetResult<Vec<u8>> {
        let too_many = || {
            broken(&format!(
                "a page has more than the {bytes_max} bytes that its values can take"
            ))
        };
        if bytes_max > PAGE_BYTES_MAX {
            return Err(broken(&format!(
                "a page may have {bytes_max} bytes; {PAGE_BYTES_MAX} are read at most"
            )));
        }
        #[expect(clippy::cast_possible_truncation, reason = "at most PAGE_BYTES_MAX")]
        let room = bytes_max as usize;
        let mut output = vec![0; room];
        let length = match self {
            Self::None => return Ok(input.to_vec()),
            Self::Lz4 => lz4_flex::block::decompress_into(input, &mut output).map_err(wrong)?,
            Self::Lz4Hadoop => hadoop_blocks(input, &mut output)?,
            Self::Snappy => {
                if snap::raw::decompress_len(input).map_err(wrong)? > room {
                    return Err(too_many());
                }
                snap::raw::Decoder::new()
                    .decompress(input, &mut output)
                    .map_err(wrong)?
            }
            Self::Zstd => zstd_safe::decompress(&mut output[..], input)
                .map_err(|code| broken(zstd_safe::get_error_name(code)))?,
            Self::Gzip => {
                output.clear();
                flate2::read::MultiGzDecoder::new(input)
                    .take(bytes_max + 1)
                    .read_to_end(&mut output)
                    .map_err(wrong)?;
                if output.len() > room {
                    return Err(too_many());
                }
                output.len()
            }
        };
        output.truncate(length);
        Ok(output)
    }
}

/// Most bytes of a data page with that many values. Plain values and levels take less than twice a value's
/// bytes and four; a delta encoding takes a little more than the values.
fn data_bytes_max(values: u32, value_bytes: u64) -> u64 {
    u64::from(values) * (2 * value_bytes + 4) + PAGE_EXTRA_BYTES
}

/// Blocks of LZ4, each after its two lengths, big-endian: decompressed, compressed.
fn hadoop_blocks(mut input: &[u8], output: &mut [u8]) -> ParquetResult<usize> {
    let mut length = 0;
    while !input.is_empty() {
        let (_, rest) = be_length(input)?;
        let (compressed, rest) = be_length(rest)?;
        let (block, rest) = rest
            .split_at_checked(compressed)
            .ok_or_else(|| broken("a block of LZ4 is longer than its page"))?;
        length += lz4_flex::block::decompress_into(block, &mut output[length..]).map_err(wrong)?;
        input = rest;
    }
    Ok(length)
}

/// A length of four bytes, and what follows it.
fn be_length(input: &[u8]) -> ParquetResult<(usize, &[u8])> {
    let (length, rest) = input
        .split_first_chunk::<4>()
        .ok_or_else(|| broken("a block of LZ4 has no length"))?;
    Ok((u32::from_be_bytes(*length) as usize, rest))
}

fn broken(reason: &str) -> ParquetError {
    ParquetError::General(reason.to_owned())
}

fn wrong(error: impl std::fmt::Display) -> ParquetError {
    broken(&format!("a page cannot be decompressed: {error}"))
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use super::*;

    const ALL: [Codec; 5] = [
        Codec::Lz4,
        Codec::Lz4Hadoop,
        Codec::Snappy,
        Codec::Zstd,
        Codec::Gzip,
    ];

    fn compressed(codec: Codec, bytes: &[u8]) -> Vec<u8> {
        match codec {
            Codec::None => bytes.to_vec(),
            Codec::Lz4 => lz4_flex::block::compress(bytes),
            Codec::Lz4Hadoop => bytes
                .chunks(1000)
                .flat_map(|part| {
                    let block = lz4_flex::block::compress(part);
                    let length = |length: usize| u32::try_from(length).unwrap().to_be_bytes();
                    [&length(part.len())[..], &length(block.len()), &block].concat()
                })
                .collect(),
            Codec::Snappy => snap::raw::Encoder::new().compress_vec(bytes).unwrap(),
            Codec::Zstd => {
                let mut output = Vec::with_capacity(zstd_safe::compress_bound(bytes.len()));
                zstd_safe::compress(&mut output, bytes, 3).unwrap();
                output
            }
            Codec::Gzip => {
                let mut encoder =
                    flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::new(6));
                encoder.write_all(bytes).unwrap();
                encoder.finish().unwrap()
            }
        }
    }

    #[test]
    fn output_up_to_the_bound_is_returned_and_one_byte_more_is_an_error() {
        let bytes: Vec<u8> = (0..1250u32).flat_map(|n| (n / 7).to_le_bytes()).collect();
        for codec in ALL {
            let input = compressed(codec, &bytes);
            assert_eq!(codec.output(&input, 5000).unwrap(), bytes, "{codec:?}");
            assert_eq!(codec.output(&input, 9000).unwrap(), bytes, "{codec:?}");
            codec.output(&input, 4999).unwrap_err();
            codec.output(&input, PAGE_BYTES_MAX + 1).unwrap_err();
        }
    }

    #[test]
    fn input_cut_short_or_changed_is_an_error_or_other_bytes() {
        let bytes: Vec<u8> = (0..750u32)
            .flat_map(|n| (n * n / 11).to_le_bytes())
            .collect();
        for codec in ALL {
            let input = compressed(codec, &bytes);
            for length in 0..input.len().min(300) {
                if let Ok(output) = codec.output(&input[..length], 3000) {
                    assert!(output.len() < 3000, "{codec:?}");
                }
                let mut changed = input.clone();
                changed[length] ^= 0x81;
                if let Ok(output) = codec.output(&changed, 3000) {
                    assert!(output.len() <= 3000, "{codec:?}");
                }
            }
        }
    }

    #[test]
    fn page_that_explodes_is_stopped_at_its_bound() {
        let zeros = vec![0; 16 << 20];
        for codec in ALL {
            let input = compressed(codec, &zeros);
            assert!(input.len() < 1 << 20, "{codec:?}");
            codec.output(&input, 1 << 20).unwrap_err();
        }
    }

    #[test]
    fn compression_that_is_not_read_is_named() {
        let error = Codec::of(Compression::LZO).unwrap_err();
        assert!(error.starts_with("it is compressed by LZO"), "{error}");
    }
}
