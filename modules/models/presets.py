"""What each preset is, in one line for `--help preset`: paper, sizes and number of parameters.

Those of texts are counted with the vocabulary that the line names."""

IMAGES = {
    "digits": "a ViT for 8 x 8 pixels: convolutional stem, rotary positions, 0.2 M parameters",
    "tiny": "ViT-Ti/16 (Steiner 2021), 224 x 224, 5.7 M parameters",
    "small": "ViT-S/16 (Steiner 2021), 224 x 224, 22 M parameters",
    "base": "ViT-B/16 (Dosovitskiy 2021), 224 x 224, 87 M parameters",
    "large": "ViT-L/16 (Dosovitskiy 2021), 224 x 224, 304 M parameters",
    "huge": "ViT-H/14 (Dosovitskiy 2021), 224 x 224, 632 M parameters",
    "giant": "ViT-g/14 (Zhai 2022), 224 x 224, mean of patches, 1.0 B parameters",
    "gigantic": "ViT-G/14 (Zhai 2022), 224 x 224, mean of patches, 1.8 B parameters",
    "22b": "ViT-22B/14 (Dehghani 2023), 224 x 224, 21.8 B parameters",
    "deit_tiny": "DeiT-Ti (Touvron 2021), distillation token, 224 x 224, 5.9 M parameters",
    "deit_small": "DeiT-S (Touvron 2021), distillation token, 224 x 224, 22 M parameters",
    "deit_base": "DeiT-B (Touvron 2021), distillation token, 224 x 224, 87 M parameters",
    "mixer_small": "MLP-Mixer S/16 (Tolstikhin 2021), 224 x 224, 19 M parameters",
    "mixer_base": "MLP-Mixer B/16 (Tolstikhin 2021), 224 x 224, 60 M parameters",
    "mixer_large": "MLP-Mixer L/16 (Tolstikhin 2021), 224 x 224, 208 M parameters",
    "mixer_cifar": "a Mixer for a CPU: convolutional stem, 32 x 32, 0.8 M parameters",
    "cct_2_3x2": "CCT-2/3x2 (Hassani 2021), 2 blocks, 32 x 32, 0.3 M parameters",
    "cct_7_3x1": "CCT-7/3x1 (Hassani 2021), 7 blocks, 32 x 32, 3.8 M parameters",
    "hybrid_tiny": "R+Ti/16 (Steiner 2021), ResNet stem, 224 x 224, 6.3 M parameters",
    "cifar_tiny": "a ViT of 9 blocks with patches of 4, 32 x 32, 4.0 M parameters",
    "cifar_small": "a ViT of 7 wider blocks with patches of 4, 32 x 32, 5.6 M parameters",
    "cifar_cpu": "a ViT of 2 blocks for a CPU: convolutional stem, 32 x 32, 2.7 M parameters",
    "swin_tiny": "Swin-T (Liu 2021), 224 x 224, 28 M parameters",
    "swin_small": "Swin-S (Liu 2021), 224 x 224, 50 M parameters",
    "swin_base": "Swin-B (Liu 2021), 224 x 224, 88 M parameters",
    "swin_large": "Swin-L (Liu 2021), 224 x 224, 197 M parameters",
    "swinv2_tiny": "Swin v2 T (Liu 2022), windows of 8, 256 x 256, 28 M parameters",
    "swinv2_small": "Swin v2 S (Liu 2022), windows of 8, 256 x 256, 50 M parameters",
    "swinv2_base": "Swin v2 B (Liu 2022), windows of 8, 256 x 256, 88 M parameters",
    "swinv2_large": "Swin v2 L (Liu 2022), windows of 8, 256 x 256, 197 M parameters",
    "swin_cifar": "a Swin of 3 stages with patches of 2, 32 x 32, 2.6 M parameters",
    "swin_cifar_cpu": "a Swin for a CPU: convolutional stem, 32 x 32, 5.2 M parameters",
}
MAE = {
    "digits": "a ViT of 4 blocks, a decoder of 2, 8 x 8, 0.3 M parameters",
    "base": "ViT-B/16 with a decoder of 8 blocks (He 2022), 224 x 224, 112 M parameters",
    "large": "ViT-L/16 with a decoder of 8 blocks (He 2022), 224 x 224, 329 M parameters",
    "huge": "ViT-H/14 with a decoder of 8 blocks (He 2022), 224 x 224, 657 M parameters",
    "cifar_cpu": "a ViT of 6 blocks for a CPU, a decoder of one block, 32 x 32, 2.8 M parameters",
}
BERT = {
    "tiny": "BERT-tiny (Turc 2019), 2 blocks of width 128, 4.4 M parameters with 30522 tokens",
    "mini": "BERT-mini (Turc 2019), 4 blocks of width 256, 11 M parameters with 30522 tokens",
    "small": "BERT-small (Turc 2019), 4 blocks of width 512, 29 M parameters with 30522 tokens",
    "base": "BERT-base (Devlin 2019), 12 blocks, 109 M parameters with 30522 tokens",
    "large": "BERT-large (Devlin 2019), 24 blocks, 335 M parameters with 30522 tokens",
    "modern": "BERT with rotary positions and GeGLU, 4 blocks, 11 M parameters with 30522 tokens",
}
DECODERS = {
    "tiny": "a GPT-2 of 4 blocks of width 128, 7.3 M parameters with 50257 tokens",
    "small": "a GPT-2 of 6 blocks of width 384, 30 M parameters with 50257 tokens",
    "gpt2": "GPT-2 (Radford 2019), 12 blocks of width 768, 124 M parameters with 50257 tokens",
    "gpt2_medium": "GPT-2 medium, 24 blocks of width 1024, 355 M parameters with 50257 tokens",
    "gpt2_large": "GPT-2 large, 36 blocks of width 1280, 774 M parameters with 50257 tokens",
    "gpt2_xl": "GPT-2 XL, 48 blocks of width 1600, 1.6 B parameters with 50257 tokens",
    "megatron": "Megatron (Shoeybi 2019), 72 blocks, 8.3 B parameters with 50257 tokens",
    "turing_nlg": "Turing-NLG (Rosset 2020), 78 blocks, 17.2 B parameters with 50257 tokens",
    "gpt3": "GPT-3 (Brown 2020), dense, 96 blocks, 175 B parameters with 50257 tokens",
    "llama": "12 blocks of Llama 2 (Touvron 2023) of width 768, 125 M parameters with 32000 tokens",
}
IMAGE_GPT = {
    "digits": "an image GPT for digits, 4 blocks of width 96",
    "cifar_cpu": "an image GPT for a CPU, 8 blocks of width 128",
    "imagegpt_small": "iGPT-S (Chen 2020), 24 blocks of width 512, 77 M parameters",
    "imagegpt_medium": "iGPT-M (Chen 2020), 36 blocks of width 1024, 455 M parameters",
    "imagegpt_large": "iGPT-L (Chen 2020), 48 blocks of width 1536, 1.4 B parameters",
}
SEQ2SEQ = {
    "tiny": "for small data, 4 + 4 blocks of width 128, 2.6 M parameters with 10000 tokens",
    "base": "the base Transformer (Vaswani 2017), 6 + 6 blocks, 63 M parameters with 37000 tokens",
    "big": "the big Transformer (Vaswani 2017), 6 + 6 blocks, 214 M parameters with 37000 tokens",
}
