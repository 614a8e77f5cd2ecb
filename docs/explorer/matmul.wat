;; Source of matmul.wasm (wat2wasm matmul.wat). matmul.js has the same product in plain JavaScript.
;; y[n, outs] = x[n, width] . w[outs, width]^T in float32. Pointers are byte addresses.
(module
  (import "page" "memory" (memory 1))

  (func $sum (param $v v128) (result f32)
    (f32.add
      (f32.add (f32x4.extract_lane 0 (local.get $v)) (f32x4.extract_lane 1 (local.get $v)))
      (f32.add (f32x4.extract_lane 2 (local.get $v)) (f32x4.extract_lane 3 (local.get $v)))))

  ;; n: tokens, any number. width: a multiple of 4. outs: a multiple of 2. stride: floats from one row of w to the next.
  (func (export "matmul")
    (param $y i32) (param $x i32) (param $w i32) (param $n i32) (param $width i32) (param $outs i32) (param $stride i32)
    (local $token i32) (local $out i32) (local $left i32) (local $end i32) (local $p i32) (local $q i32)
    (local $xa i32) (local $xb i32) (local $xc i32) (local $xd i32)
    (local $ya i32) (local $yb i32) (local $yc i32) (local $yd i32)
    (local $u v128) (local $v v128) (local $t v128)
    (local $a0 v128) (local $b0 v128) (local $c0 v128) (local $d0 v128)
    (local $a1 v128) (local $b1 v128) (local $c1 v128) (local $d1 v128)
    (local.set $width (i32.shl (local.get $width) (i32.const 2))) ;; bytes from here on
    (local.set $outs (i32.shl (local.get $outs) (i32.const 2)))
    (local.set $stride (i32.shl (local.get $stride) (i32.const 2)))

    (loop $tokens ;; four tokens a, b, c, d. Beyond the last token: the last token again, which writes the same values
      (local.set $left (i32.sub (local.get $n) (local.get $token)))
      (local.set $ya (i32.add (local.get $y) (i32.mul (local.get $token) (local.get $outs))))
      (local.set $yb (i32.add (local.get $ya) (select (local.get $outs) (i32.const 0) (i32.gt_s (local.get $left) (i32.const 1)))))
      (local.set $yc (i32.add (local.get $yb) (select (local.get $outs) (i32.const 0) (i32.gt_s (local.get $left) (i32.const 2)))))
      (local.set $yd (i32.add (local.get $yc) (select (local.get $outs) (i32.const 0) (i32.gt_s (local.get $left) (i32.const 3)))))
      (local.set $out (i32.const 0))
      (local.set $p (local.get $w))

      (loop $outputs ;; two outputs 0 and 1, whose weights begin at p and q
        (local.set $xa (i32.add (local.get $x) (i32.mul (local.get $token) (local.get $width))))
        (local.set $xb (i32.add (local.get $xa) (select (local.get $width) (i32.const 0) (i32.gt_s (local.get $left) (i32.const 1)))))
        (local.set $xc (i32.add (local.get $xb) (select (local.get $width) (i32.const 0) (i32.gt_s (local.get $left) (i32.const 2)))))
        (local.set $xd (i32.add (local.get $xc) (select (local.get $width) (i32.const 0) (i32.gt_s (local.get $left) (i32.const 3)))))
        (local.set $q (i32.add (local.get $p) (local.get $stride)))
        (local.set $a0 (v128.const f32x4 0 0 0 0)) (local.set $a1 (local.get $a0))
        (local.set $b0 (local.get $a0)) (local.set $b1 (local.get $a0))
        (local.set $c0 (local.get $a0)) (local.set $c1 (local.get $a0))
        (local.set $d0 (local.get $a0)) (local.set $d1 (local.get $a0))
        (local.set $end (i32.add (local.get $xa) (local.get $width)))

        (loop $inner ;; four numbers of each operand at a time
          (local.set $u (v128.load (local.get $p)))
          (local.set $v (v128.load (local.get $q)))
          (local.set $t (v128.load (local.get $xa)))
          (local.set $a0 (f32x4.add (local.get $a0) (f32x4.mul (local.get $u) (local.get $t))))
          (local.set $a1 (f32x4.add (local.get $a1) (f32x4.mul (local.get $v) (local.get $t))))
          (local.set $t (v128.load (local.get $xb)))
          (local.set $b0 (f32x4.add (local.get $b0) (f32x4.mul (local.get $u) (local.get $t))))
          (local.set $b1 (f32x4.add (local.get $b1) (f32x4.mul (local.get $v) (local.get $t))))
          (local.set $t (v128.load (local.get $xc)))
          (local.set $c0 (f32x4.add (local.get $c0) (f32x4.mul (local.get $u) (local.get $t))))
          (local.set $c1 (f32x4.add (local.get $c1) (f32x4.mul (local.get $v) (local.get $t))))
          (local.set $t (v128.load (local.get $xd)))
          (local.set $d0 (f32x4.add (local.get $d0) (f32x4.mul (local.get $u) (local.get $t))))
          (local.set $d1 (f32x4.add (local.get $d1) (f32x4.mul (local.get $v) (local.get $t))))
          (local.set $p (i32.add (local.get $p) (i32.const 16)))
          (local.set $q (i32.add (local.get $q) (i32.const 16)))
          (local.set $xb (i32.add (local.get $xb) (i32.const 16)))
          (local.set $xc (i32.add (local.get $xc) (i32.const 16)))
          (local.set $xd (i32.add (local.get $xd) (i32.const 16)))
          (br_if $inner (i32.lt_u
            (local.tee $xa (i32.add (local.get $xa) (i32.const 16)))
            (local.get $end))))

        (f32.store (i32.add (local.get $ya) (local.get $out)) (call $sum (local.get $a0)))
        (f32.store (i32.add (local.get $yb) (local.get $out)) (call $sum (local.get $b0)))
        (f32.store (i32.add (local.get $yc) (local.get $out)) (call $sum (local.get $c0)))
        (f32.store (i32.add (local.get $yd) (local.get $out)) (call $sum (local.get $d0)))
        (f32.store offset=4 (i32.add (local.get $ya) (local.get $out)) (call $sum (local.get $a1)))
        (f32.store offset=4 (i32.add (local.get $yb) (local.get $out)) (call $sum (local.get $b1)))
        (f32.store offset=4 (i32.add (local.get $yc) (local.get $out)) (call $sum (local.get $c1)))
        (f32.store offset=4 (i32.add (local.get $yd) (local.get $out)) (call $sum (local.get $d1)))
        (local.set $p (i32.add ;; the weights of the next two outputs
          (i32.sub (local.get $q) (local.get $width))
          (local.get $stride)))
        (br_if $outputs (i32.lt_s
          (local.tee $out (i32.add (local.get $out) (i32.const 8)))
          (local.get $outs))))
      (br_if $tokens (i32.lt_s
        (local.tee $token (i32.add (local.get $token) (i32.const 4)))
        (local.get $n))))))
