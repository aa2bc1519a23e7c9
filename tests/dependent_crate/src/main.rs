//! Attends to two keys from another crate: the linker finds the shims, the kernels and the C symbols without further options.

use xla_attention::{
    FlashAttnVarlenInputs, FlashAttnVarlenOptions, Kv, On, Result, TensorMut, TensorRef, flash_attn_varlen,
};

fn main() -> Result<()> {
    let (q, k, v) = ([1.0f32; 8], [0.0f32; 16], [[10.0f32; 8], [30.0; 8]]);
    let inputs = FlashAttnVarlenInputs {
        q: TensorRef::new(&q, &[1, 1, 8]), // [total_q, Hq, D]
        kv: Kv::Split { k: TensorRef::new(&k, &[2, 1, 8]), v: TensorRef::new(v.as_flattened(), &[2, 1, 8]) },
        cu_seqlens_q: TensorRef::new(&[0, 1], &[2]),
    };
    let options = FlashAttnVarlenOptions { cu_seqlens_k: Some(TensorRef::new(&[0, 2], &[2])), ..Default::default() };
    let mut out = [0.0f32; 8];
    flash_attn_varlen(&inputs, &options, TensorMut::new(&mut out, &[1, 1, 8]), On::cpu())?;
    assert!(out.iter().all(|x| (x - 20.0).abs() < 1e-5), "{out:?}"); // both keys score the same
    Ok(())
}
