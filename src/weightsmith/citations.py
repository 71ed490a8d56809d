"""BibTeX entries of what the methods come from. They are found by the text in which a method names its sources."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

_ARXIV = re.compile(r"arxiv\.org/abs/(\d{4}\.\d{4,5})", re.ASCII)


@dataclass(frozen=True, slots=True)
class Entry:
    """One BibTeX entry.

    key      `yadav2023ties`
    year     of the first version
    authors  first name first, `and` between them
    where    further fields: journal, volume, pages
    """

    key: str
    year: int
    title: str
    authors: str
    where: Mapping[str, str]

    def bibtex(self) -> str:
        """The entry as text."""
        kind = "article" if "journal" in self.where else "misc"
        fields = {"title": self.title, "author": self.authors, "year": str(self.year), **self.where}
        lines = [f"  {name:<13} = {{{value}}}," for name, value in fields.items()]
        return "\n".join([f"@{kind}{{{self.key},", *lines, "}"])


def cite(source: str) -> list[Entry]:
    """The entries of the papers that a text names, in its order.

    >>> print(cite("Jang et al. 2024, Model Stock, https://arxiv.org/abs/2403.19522")[0].bibtex())
    @misc{jang2024model,
      title         = {{Model Stock}: All We Need Is Just a Few Fine-Tuned Models},
      author        = {Dong-Hwan Jang and Sangdoo Yun and Dongyoon Han},
      year          = {2024},
      eprint        = {2403.19522},
      archivePrefix = {arXiv},
    }
    """
    found = {match.start(): _PAPERS[match[1]] for match in _ARXIV.finditer(source) if match[1] in _PAPERS}
    found |= {source.index(text): entry for text, entry in _OTHERS.items() if text in source}
    return [found[place] for place in sorted(found)]


def _arxiv(number: str, key: str, title: str, authors: str) -> tuple[str, Entry]:
    return number, Entry(key, 2000 + int(number[:2]), title, authors, {"eprint": number, "archivePrefix": "arXiv"})


_PAPERS = dict(
    (
        _arxiv(
            "1912.13445",
            "pillutla2019robust",
            "Robust Aggregation for Federated Learning",
            "Krishna Pillutla and Sham M. Kakade and Zaid Harchaoui",
        ),
        _arxiv(
            "2203.05482",
            "wortsman2022model",
            "Model Soups: Averaging Weights of Multiple Fine-Tuned Models Improves Accuracy without Increasing Inference Time",
            "Mitchell Wortsman and Gabriel Ilharco and Samir Yitzhak Gadre and Rebecca Roelofs and Raphael Gontijo-Lopes and "
            "Ari S. Morcos and Hongseok Namkoong and Ali Farhadi and Yair Carmon and Simon Kornblith and Ludwig Schmidt",
        ),
        _arxiv(
            "2212.04089",
            "ilharco2022editing",
            "Editing Models with Task Arithmetic",
            "Gabriel Ilharco and Marco Tulio Ribeiro and Mitchell Wortsman and Suchin Gururangan and Ludwig Schmidt and "
            "Hannaneh Hajishirzi and Ali Farhadi",
        ),
        _arxiv(
            "2212.09849",
            "jin2022dataless",
            "Dataless Knowledge Fusion by Merging Weights of Language Models",
            "Xisen Jin and Xiang Ren and Daniel Preotiuc-Pietro and Pengxiang Cheng",
        ),
        _arxiv(
            "2306.01708",
            "yadav2023ties",
            "{TIES-Merging}: Resolving Interference When Merging Models",
            "Prateek Yadav and Derek Tam and Leshem Choshen and Colin Raffel and Mohit Bansal",
        ),
        _arxiv(
            "2311.03099",
            "yu2023language",
            "Language Models are {Super Mario}: Absorbing Abilities from Homologous Models as a Free Lunch",
            "Le Yu and Bowen Yu and Haiyang Yu and Fei Huang and Yongbin Li",
        ),
        _arxiv(
            "2312.06795",
            "davari2023model",
            "{Model Breadcrumbs}: Scaling Multi-Task Model Merging with Sparse Masks",
            "MohammadReza Davari and Eugene Belilovsky",
        ),
        _arxiv(
            "2312.15166",
            "kim2023solar",
            "{SOLAR} {10.7B}: Scaling Large Language Models with Simple yet Effective Depth Up-Scaling",
            "Dahyun Kim and Chanjun Park and Sanghoon Kim and Wonsung Lee and Wonho Song and Yunsu Kim and Hyeonwoo Kim and "
            "Yungi Kim and Hyeonju Lee and Jihoo Kim and Changbae Ahn and Seonghoon Yang and Sukyung Lee and Hyunbyung Park "
            "and Gyoungjin Gim and Mikyoung Cha and Hwalsuk Lee and Sunghun Kim",
        ),
        _arxiv(
            "2403.19522",
            "jang2024model",
            "{Model Stock}: All We Need Is Just a Few Fine-Tuned Models",
            "Dong-Hwan Jang and Sangdoo Yun and Dongyoon Han",
        ),
        _arxiv(
            "2405.07813",
            "wang2024localizing",
            "Localizing Task Information for Improved Model Merging and Compression",
            "Ke Wang and Nikolaos Dimitriadis and Guillermo Ortiz-Jimenez and François Fleuret and Pascal Frossard",
        ),
        _arxiv(
            "2406.11617",
            "deep2024della",
            "{DELLA-Merging}: Reducing Interference in Model Merging through Magnitude-Based Sampling",
            "Pala Tej Deep and Rishabh Bhardwaj and Soujanya Poria",
        ),
        _arxiv(
            "2407.06322",
            "marczak2024magmax",
            "{MagMax}: Leveraging Model Merging for Seamless Continual Learning",
            "Daniel Marczak and Bartłomiej Twardowski and Tomasz Trzciński and Sebastian Cygert",
        ),
        _arxiv(
            "2408.07990",
            "wan2024fusechat",
            "{FuseChat}: Knowledge Fusion of Chat Models",
            "Fanqi Wan and Longguang Zhong and Ziyi Yang and Ruijun Chen and Xiaojun Quan",
        ),
        _arxiv(
            "2408.13656",
            "he2024localize",
            "{Localize-and-Stitch}: Efficient Model Merging via Sparse Task Arithmetic",
            "Yifei He and Yuzheng Hu and Yong Lin and Tong Zhang and Han Zhao",
        ),
        _arxiv(
            "2412.00081",
            "gargiulo2024task",
            "Task Singular Vectors: Reducing Task Interference in Model Merging",
            "Antonio Andrea Gargiulo and Donato Crisostomi and Maria Sofia Bucarelli and Simone Scardapane and "
            "Fabrizio Silvestri and Emanuele Rodolà",
        ),
        _arxiv(
            "2412.12153",
            "choi2024revisiting",
            "Revisiting Weight Averaging for Model Merging",
            "Jiho Choi and Donggyun Kim and Chanhyuk Lee and Seunghoon Hong",
        ),
        _arxiv(
            "2502.04959",
            "marczak2025task",
            "No Task Left Behind: Isotropic Model Merging with Common and Task-Specific Subspaces",
            "Daniel Marczak and Simone Magistri and Sebastian Cygert and Bartłomiej Twardowski and Andrew D. Bagdanov and "
            "Joost van de Weijer",
        ),
        _arxiv(
            "2502.10339",
            "lee2025star",
            "{STAR}: Spectral Truncation and Rescale for Model Merging",
            "Yu-Ang Lee and Ching-Yun Ko and Tejaswini Pedapati and I-Hsin Chung and Mi-Yen Yeh and Pin-Yu Chen",
        ),
        _arxiv(
            "2503.01874",
            "yang2025cabs",
            "{CABS}: Conflict-Aware and Balanced Sparsification for Enhancing Model Merging",
            "Zongzhen Yang and Binhang Qi and Hailong Sun and Wenrui Long and Ruobing Zhao and Xiang Gao",
        ),
        _arxiv(
            "2503.08099",
            "cheng2025whoever",
            "Whoever Started the Interference Should End It: Guiding Data-Free Model Merging via Task Vectors",
            "Runxi Cheng and Feng Xiong and Yongxian Wei and Wanyun Zhu and Chun Yuan",
        ),
        _arxiv(
            "2505.10833",
            "he2025mergebench",
            "{MergeBench}: A Benchmark for Merging Domain-Specialized {LLMs}",
            "Yifei He and Siqi Zeng and Yuzheng Hu and Rui Yang and Tong Zhang and Han Zhao",
        ),
        _arxiv(
            "2601.13572",
            "yuan2026behavior",
            "Behavior Knowledge Merge in Reinforced Agentic Models",
            "Xiangchi Yuan and Dachuan Shi and Chunhui Zhang and Zheyuan Liu and Shenglong Yao and Soroush Vosoughi and "
            "Wenke Lee",
        ),
        _arxiv(
            "2602.05536",
            "li2026shared",
            "When Shared Knowledge Hurts: Spectral Over-Accumulation in Model Merging",
            "Yayuan Li and Ze Peng and Jian Zhang and Jintao Guo and Yue Duan and Yinghuan Shi",
        ),
        _arxiv(
            "2603.04972",
            "wang2026functionality",
            "Functionality-Oriented {LLM} Merging on the {Fisher--Rao} Manifold",
            "Jiayu Wang and Zuojun Ye and Wenpeng Yin",
        ),
        _arxiv(
            "2606.02252",
            "sun2026resmerge",
            "{ResMerge}: Residual-based Spectral Merging of Large Language Models",
            "Yandu Sun and Zhiyan Hou and Haokai Ma and Yuheng Jia and Junfeng Fang and Haiyun Guo and Hongyan An and "
            "Weizhen Wang and Jinqiao Wang",
        ),
    )
)
"""By number on arXiv."""

_OTHERS = {
    "mergekit, ": _arxiv(
        "2403.13257",
        "goddard2024mergekit",
        "{Arcee's MergeKit}: A Toolkit for Merging Large Language Models",
        "Charles Goddard and Shamane Siriwardhana and Malikeh Ehghaghi and Luke Meyers and Vlad Karpukhin and Brian Benedict "
        "and Mark McQuade and Jacob Solawetz",
    )[1],
    "Shoemake 1985": Entry(
        "shoemake1985animating",
        1985,
        "Animating Rotation with Quaternion Curves",
        "Ken Shoemake",
        {"journal": "ACM SIGGRAPH Computer Graphics", "volume": "19", "number": "3", "pages": "245--254"},
    ),
    "Karcher 1977": Entry(
        "karcher1977riemannian",
        1977,
        "Riemannian Center of Mass and Mollifier Smoothing",
        "Hermann Karcher",
        {"journal": "Communications on Pure and Applied Mathematics", "volume": "30", "number": "5", "pages": "509--541"},
    ),
    "Weiszfeld 1937": Entry(
        "weiszfeld1937point",
        1937,
        "Sur le point pour lequel la somme des distances de n points donnés est minimum",
        "Endre Weiszfeld",
        {"journal": "Tohoku Mathematical Journal", "volume": "43", "pages": "355--386"},
    ),
    "Vardi and Zhang 2000": Entry(
        "vardi2000multivariate",
        2000,
        "The Multivariate L1-Median and Associated Data Depth",
        "Yehuda Vardi and Cun-Hui Zhang",
        {"journal": "Proceedings of the National Academy of Sciences", "volume": "97", "number": "4", "pages": "1423--1426"},
    ),
}
"""By the words with which sources name them."""
